"""Insert observers into an annotated graph."""

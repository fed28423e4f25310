"""Whether oneDNN's integer products are right on this machine: each is tried once."""

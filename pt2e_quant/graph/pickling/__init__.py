"""Graph modules as bytes."""

"""Quantized modules as canonical graphs, and graphs loaded back into modules."""

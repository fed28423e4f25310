"""Placeholders for tensors that are quantized at run time."""

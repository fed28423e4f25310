"""Edits of quantize and dequantize nodes."""

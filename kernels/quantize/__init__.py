"""Quantize, dequantize, and an activation function between them, in one launch."""

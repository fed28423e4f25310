"""Quantized tensors joined along an axis, each requantized to the result's qparams."""

"""Kernels for operations on quantized tensors, and the choice of kernel and layout."""

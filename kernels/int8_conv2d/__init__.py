"""Convolution of int8 images with int8 weights, with everything that follows it fused."""

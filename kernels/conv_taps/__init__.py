"""Sums over the taps of a window, which convolution kernels are made of."""

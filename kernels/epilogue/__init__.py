"""The epilogue of kernels: bias, residual, activation, requantize."""

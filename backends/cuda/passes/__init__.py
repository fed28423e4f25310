"""Rewrites that only the Triton kernels need."""

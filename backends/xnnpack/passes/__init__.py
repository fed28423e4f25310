"""Rewrites that only ExecuTorch and XNNPACK need."""

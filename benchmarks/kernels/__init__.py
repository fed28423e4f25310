"""Kernel development: timing cases, ahead-of-time compilation, instruction baselines."""

"""Kernels compiled and judged without a GPU: registers, spills, instructions, loads."""

"""Rewrites that only oneDNN's operators need."""

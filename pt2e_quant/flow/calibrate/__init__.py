"""Data runs through a prepared graph."""

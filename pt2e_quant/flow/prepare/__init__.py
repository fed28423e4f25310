"""Observers are put into an annotated graph."""

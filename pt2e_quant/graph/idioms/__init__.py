"""Composite operators that are recognised in a graph once, for every reader."""

"""Trials of oneDNN's integer products on this machine: each is tried once."""

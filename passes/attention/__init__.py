"""Attention written out or narrowed."""

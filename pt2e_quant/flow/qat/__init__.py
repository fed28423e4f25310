"""Preparing for training, and its schedule."""

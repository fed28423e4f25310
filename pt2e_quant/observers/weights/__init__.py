"""Observers of constant weights."""

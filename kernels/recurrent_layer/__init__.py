"""Recurrent layers with int8 weights."""

"""Operators that only move data, on the integers themselves."""

"""Fake-quantizes and what they train."""

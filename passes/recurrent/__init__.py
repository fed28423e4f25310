"""Recurrent operators split into layers and cells."""

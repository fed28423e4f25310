"""Run data through a prepared graph."""

"""Observers become q/dq nodes, weights become integers."""

"""Optimizers with states of few bits, and with copies of parameters in another precision."""

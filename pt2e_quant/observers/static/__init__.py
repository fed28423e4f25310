"""Observers whose qparams are chosen once, from calibration data."""

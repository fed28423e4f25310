"""Qparams out to JSON and in again: AIMET's encodings, and this package's own."""

"""Floor 3: annotate, prepare, calibrate, convert."""

"""Statistics that algorithms gather on tensors during calibration."""

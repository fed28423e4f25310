"""What algorithms want to know of the tensors that calibration runs through."""

"""What was quantized, what was not and why, and the sizes."""

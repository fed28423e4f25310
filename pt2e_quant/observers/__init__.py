"""Floor 1: statistics to quantization parameters."""

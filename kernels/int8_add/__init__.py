"""The sum, difference or product of two quantized tensors, activated and requantized."""

"""What a kernel does with a sum before it is written: bias, residual, activation, requantize."""

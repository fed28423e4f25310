"""The qparams of a whole tensor and the tensor quantized with them, in two launches."""

"""Which kernel runs an operation on quantized tensors, and in which layout."""

"""Storage of quantized constants: storing, packing, unpacking."""

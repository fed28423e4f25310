"""Reports of quantized tensors, of nodes left float with reasons, and of sizes."""

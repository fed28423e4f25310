"""A quantization compiler for torch.export graphs."""

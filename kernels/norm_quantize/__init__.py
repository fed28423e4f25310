"""Layer norm and RMS norm whose result is quantized, statically or per token, in one launch."""

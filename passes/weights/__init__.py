"""How quantized constants are stored, packed and unpacked."""

"""Rows of a quantized embedding table, dequantized as they are looked up."""

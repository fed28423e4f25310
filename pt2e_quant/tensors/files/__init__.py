"""Quantized modules in safetensors files and in Hugging Face's form."""

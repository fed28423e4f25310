"""Algorithms of post-training quantization: what they need, where they apply, what they change."""

"""Linear on int8 activations and 4-bit weights in groups, with everything that follows it fused."""

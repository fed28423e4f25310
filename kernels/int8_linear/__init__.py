"""Linear on int8 activations and int8 weights, with everything that follows it fused."""

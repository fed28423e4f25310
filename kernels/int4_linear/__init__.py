"""Linear on floats and 4-bit weights in groups, with everything that follows it fused."""

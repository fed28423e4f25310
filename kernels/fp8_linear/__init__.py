"""Linear on 8-bit floats (e4m3), with everything that follows it fused."""

"""Floor 2: one folder a fused op: reference, CPU, Triton, registration."""

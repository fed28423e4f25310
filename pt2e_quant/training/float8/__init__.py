"""Training with linears whose three products multiply float8."""

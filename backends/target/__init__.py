"""The kit that every backend is made of."""

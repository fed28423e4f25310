"""In-place operators and written buffers made functional, and restored."""

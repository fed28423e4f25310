"""Number formats other than evenly spaced integers, and scales in blocks."""

"""Key and value caches in 8 and 4 bits."""

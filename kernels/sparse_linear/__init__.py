"""Float rows by 2:4 semi-sparse weights of 8 or 4 bits."""

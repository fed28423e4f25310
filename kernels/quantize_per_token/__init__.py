"""The qparams of each row and the row quantized with them, in one launch."""

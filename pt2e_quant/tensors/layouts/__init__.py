"""Memory layouts of the codes of a quantized tensor: lossless pairs of pack and unpack."""

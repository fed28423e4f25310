"""How the codes of a quantized tensor lie in memory: lossless pairs of pack and unpack."""

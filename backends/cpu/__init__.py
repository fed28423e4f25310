"""CPU: the integer operators of oneDNN that every CPU build of torch carries."""

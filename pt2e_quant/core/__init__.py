"""Floor 0: the vocabulary every other part speaks."""

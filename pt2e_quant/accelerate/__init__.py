"""Patches of other packages that save time or bytes.

Each file says what it saves, by how much, and for which versions (`PATCH`). The environment
variable `PT2E_QUANT_PATCHES_OFF` turns patches off by name; results are the same either way, up to
the rounding that a file states.
"""

"""Patches of other packages that save time: what each wins, its switch, its version."""

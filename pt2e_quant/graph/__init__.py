"""Floor 1: reading and editing FX graphs."""

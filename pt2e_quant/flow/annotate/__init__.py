"""Which nodes are quantized, and how: rules, groups, table quantizer, checks of specs."""

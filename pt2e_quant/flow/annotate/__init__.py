"""Annotation of the nodes to quantize: rules, groups, table quantizer, checks of specs."""

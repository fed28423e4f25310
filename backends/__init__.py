"""Floor 4: op table, lowering and artifact, one folder each."""

from pt2e_quant.backends.registry import get, names

__all__ = ["get", "names"]

"""The range of each input that calibration saw: where fresh data for a check is drawn from."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

RANGES_KEY = "pt2e_quant.input_ranges"
"""The key of `gm.meta` that holds a range for each leaf of the call, in placeholder order."""

Range: TypeAlias = tuple[float, float] | None
"""The least and the largest value; None for what has no finite range."""


def note_ranges(gm: GraphModule, leaves: Sequence[Any]) -> None:
    """Widen the ranges that a graph carries by those of one call."""
    seen = gm.meta.get(RANGES_KEY)
    found = [range_of(leaf) for leaf in leaves]
    if isinstance(seen, tuple) and len(seen) == len(found):
        found = [_union(a, b) for a, b in zip(seen, found, strict=True)]
    gm.meta[RANGES_KEY] = tuple(found)


def input_ranges(gm: GraphModule, leaves: Sequence[Any]) -> tuple[Range, ...]:
    """The ranges that calibration saw, else those of one call."""
    seen = gm.meta.get(RANGES_KEY)
    if isinstance(seen, tuple) and len(seen) == len(leaves):
        return seen
    return tuple(range_of(leaf) for leaf in leaves)


def range_of(leaf: Any) -> Range:
    """The range of one leaf; None if it is no tensor of finite numbers."""
    if not isinstance(leaf, Tensor) or leaf.dtype == torch.bool or leaf.is_complex():
        return None
    if not leaf.numel():
        return None
    low, high = (float(v) for v in leaf.detach().aminmax())
    is_finite = abs(low) < float("inf") and abs(high) < float("inf")
    return (low, high) if is_finite else None  # NaN compares as neither


def _union(a: Range, b: Range) -> Range:
    return None if a is None or b is None else (min(a[0], b[0]), max(a[1], b[1]))

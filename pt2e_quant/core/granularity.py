"""Which elements of a tensor share one scale and zero_point."""

from collections.abc import Sequence
from dataclasses import dataclass

from pt2e_quant.core.errors import ConfigError

__all__ = [
    "Granularity",
    "PerAxis",
    "PerBlock",
    "PerChannel",
    "PerGroup",
    "PerRow",
    "PerTensor",
    "PerToken",
    "block_size_of",
    "qparams_shape",
]


@dataclass(frozen=True, slots=True)
class PerTensor:
    """One scale for the whole tensor."""


@dataclass(frozen=True, slots=True)
class PerChannel:
    """One scale for each index of an axis."""

    axis: int = 0


PerAxis = PerChannel
"""The name torchao gives it."""


@dataclass(frozen=True, slots=True)
class PerRow:
    """One scale for each run of elements along a whole axis."""

    dim: int = -1


@dataclass(frozen=True, slots=True)
class PerGroup:
    """One scale for each run of group_size elements along an axis, apart for every other index."""

    group_size: int
    axis: int = -1

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size must be at least 1, found {self.group_size}")


@dataclass(frozen=True, slots=True)
class PerToken:
    """One scale for each row: all the elements that differ in the last axis only."""


@dataclass(frozen=True, slots=True)
class PerBlock:
    """One scale for each block of a given shape."""

    block_size: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.block_size or min(self.block_size) < 1:
            raise ConfigError(f"block_size must hold positive lengths, found {self.block_size}")


Granularity = PerTensor | PerChannel | PerGroup | PerRow | PerToken | PerBlock


def _axis(axis: int, shape: Sequence[int]) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ConfigError(f"axis {axis} is out of range for a tensor of shape {tuple(shape)}")
    return axis % len(shape)


def block_size_of(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the block of elements that share qparams, in a tensor of the given shape.

    Raises:
        ConfigError: if an axis is out of range or a block does not divide the shape.

    >>> block_size_of(PerGroup(32), (8, 128))
    (1, 32)
    """
    sizes = tuple(shape)
    match granularity:
        case PerTensor():
            block = sizes
        case PerChannel(axis):
            kept = _axis(axis, sizes)
            block = tuple(1 if i == kept else size for i, size in enumerate(sizes))
        case PerGroup(group_size, axis):
            grouped = _axis(axis, sizes)
            block = tuple(group_size if i == grouped else 1 for i in range(len(sizes)))
        case PerRow(dim):
            whole = _axis(dim, sizes)
            block = tuple(size if i == whole else 1 for i, size in enumerate(sizes))
        case PerToken():
            last = _axis(-1, sizes)
            block = tuple(size if i == last else 1 for i, size in enumerate(sizes))
        case PerBlock(block_size):
            block = block_size
    fits = len(block) == len(sizes) and all(
        size % length == 0 for size, length in zip(sizes, block, strict=True) if length
    )
    if not fits:
        raise ConfigError(f"{granularity} does not divide a tensor of shape {sizes}")
    return block


def qparams_shape(granularity: Granularity, shape: Sequence[int]) -> tuple[int, ...]:
    """The number of blocks along each axis, which is the shape of scale and zero_point.

    >>> qparams_shape(PerChannel(0), (8, 3, 3, 3))
    (8, 1, 1, 1)
    """
    block = block_size_of(granularity, shape)
    return tuple(size // length if length else 0 for size, length in zip(shape, block, strict=True))

"""Granularities: the sets of a tensor's elements that share one scale and zero_point."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from pt2e_quant.core.errors import ConfigError


class _Granularity:
    """Their base class: also instances of torchao's class of the same name, if torchao is loaded.

    Code of torchao, and written for it, asks that of the granularities that it is handed.
    """

    __slots__ = ()

    @property  # type: ignore[misc]  # mypy takes __class__ for a plain attribute
    def __class__(self) -> Any:
        theirs = sys.modules.get("torchao.quantization.granularity")
        name = "PerAxis" if type(self) is PerChannel else type(self).__name__
        return getattr(theirs, name, type(self))

    def _values(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in fields(type(self)))  # type: ignore[arg-type]  # all are dataclasses

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((type(self), self._values()))

    def __repr__(self) -> str:
        names = (field.name for field in fields(type(self)))  # type: ignore[arg-type]  # as above
        shown = (f"{n}={v!r}" for n, v in zip(names, self._values(), strict=True))
        return f"{type(self).__name__}({', '.join(shown)})"

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        # Pickle compares __class__ with the type.
        return type(self), self._values()


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerTensor(_Granularity):
    """One scale for the whole tensor."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerChannel(_Granularity):
    """One scale for each index of an axis."""

    axis: int = 0


PerAxis = PerChannel
"""The name torchao gives it."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerRow(_Granularity):
    """One scale for each run of elements along a whole axis."""

    dim: int = -1


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerGroup(_Granularity):
    """One scale for each run of group_size elements along an axis, apart for every other index."""

    group_size: int
    axis: int = -1

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size must be at least 1, found {self.group_size}")


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerToken(_Granularity):
    """One scale for each row: all the elements that differ in the last axis only."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, repr=False)
class PerBlock(_Granularity):
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

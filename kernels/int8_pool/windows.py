"""The elements of an axis that a pooling window covers."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pt2e_quant.core.errors import ConfigError


class PoolKind(StrEnum):
    """The reduction of a window."""

    MAX = "max"
    AVERAGE = "average"
    ADAPTIVE = "adaptive"
    """An average of windows that divide the axis as evenly as they can; one is a global pool."""


@dataclass(frozen=True, slots=True)
class Span:
    """One window along an axis.

    Args:
        start: the first element.
        end: one behind the last.
        padded: how many there are with the padding that is counted.
    """

    start: int
    end: int
    padded: int


def check_kind(kind: str) -> PoolKind:
    """A kind by its name.

    Raises:
        ConfigError: there is none such.
    """
    if kind not in set(PoolKind):
        raise ConfigError(f'a pool is {", ".join(PoolKind)}, found "{kind}"')
    return PoolKind(kind)


def spans(
    kind: PoolKind, size: int, out: int, kernel: int, stride: int, padding: int
) -> list[Span]:
    """The windows of an axis of `size` elements, as torch has them.

    >>> [(s.start, s.end, s.padded) for s in spans(PoolKind.AVERAGE, 4, 3, 3, 2, 1)]
    [(0, 2, 3), (1, 4, 3), (3, 4, 2)]
    >>> [(s.start, s.end) for s in spans(PoolKind.ADAPTIVE, 5, 2, 0, 0, 0)]
    [(0, 3), (2, 5)]
    """
    found = []
    for i in range(out):
        if kind is PoolKind.ADAPTIVE:
            start, end = i * size // out, -(-(i + 1) * size // out)
            found.append(Span(start, end, end - start))
            continue
        start = i * stride - padding
        end = min(start + kernel, size + padding)
        found.append(Span(max(start, 0), min(end, size), end - start))
    return found


def shape_class(out_size: Sequence[int]) -> str:
    """Return "global" if one window covers an image, else "window"."""
    return "global" if tuple(out_size) == (1, 1) else "window"

"""Figures that are known only after a file is written, stored in it in fields of fixed length."""

import math
from collections.abc import Sequence

_MARK = b"pt2e_quant.figures:"
_WIDTH, _COUNT = 12, 2

NO_FIGURES = (_MARK + b" " * (_WIDTH * _COUNT)).decode("ascii")
"""The placeholder that a file's writer puts where the figures go."""


def write_figures(data: bytes, figures: Sequence[float | None]) -> bytes:
    """The bytes of a file with two figures in their place, to 6 digits; None is not known."""
    before, mark, after = data.partition(_MARK)
    if not mark or _MARK in after or len(figures) != _COUNT:
        raise ValueError("the file has no one place for its figures")
    texts = ["" if value is None else f"{value:.6g}" for value in figures]
    place = "".join(text.ljust(_WIDTH) for text in texts).encode("ascii")
    return b"".join((before, mark, place, after[len(place) :]))


def read_figures(data: bytes) -> list[float | None]:
    """The figures of a file; None where none was written."""
    _, _, after = data.partition(_MARK)
    texts = [after[_WIDTH * at : _WIDTH * (at + 1)].decode("ascii", "replace") for at in (0, 1)]
    found: list[float | None] = []
    for text in texts:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        found.append(None if math.isnan(value) else value)
    return found

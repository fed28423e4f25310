"""Checks of numbers that options take: a wrong one is wrong usage, exit status 2."""

import math
import re
from collections.abc import Sequence

import typer

_FORM = re.compile(r"(?P<input>.+):(?P<dim>\d+)=(?P<size>[1-9]\d*)")


def finite(value: float | None) -> float | None:
    """Refuse infinities and NaN, which no figure is below, or every one.

    Raises:
        BadParameter: it is one of them.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def positive(value: float | None) -> float | None:
    """Refuse what is not finite and above zero.

    Raises:
        BadParameter: it is something else.
    """
    finite(value)
    if value is not None and value <= 0:
        raise typer.BadParameter(f"{value:g} is not above 0")
    return value


def cosine(value: float | None) -> float | None:
    """Refuse what no cosine to reach can be.

    Raises:
        BadParameter: it is not above 0 and at most 1.
    """
    positive(value)
    if value is not None and value > 1:
        raise typer.BadParameter(f"{value:g} is above 1, the cosine of equal outputs")
    return value


def sizes(texts: Sequence[str] | None) -> Sequence[str] | None:
    """Refuse --max-sizes of another form.

    Raises:
        BadParameter: `read_max_sizes` does not read them.
    """
    read_max_sizes(texts or ())
    return texts


def read_max_sizes(texts: Sequence[str]) -> dict[str, dict[int, int]]:
    """Read "x:0=64": input, dimension, largest size.

    >>> read_max_sizes(["x:0=64", "x:1=512"])
    {'x': {0: 64, 1: 512}}

    Raises:
        BadParameter: a text has another form.
    """
    found: dict[str, dict[int, int]] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise typer.BadParameter(f'takes input:dimension=size, as x:0=64, found "{text}"')
        found.setdefault(match["input"], {})[int(match["dim"])] = int(match["size"])
    return found

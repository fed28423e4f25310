"""The largest sizes of dynamic dimensions, as text of the command line."""

import re
from collections.abc import Sequence

from pt2e_quant.core.errors import ConfigError

__all__ = ["read_max_sizes"]

_FORM = re.compile(r"(?P<input>.+):(?P<dim>\d+)=(?P<size>\d+)")


def read_max_sizes(texts: Sequence[str]) -> dict[str, dict[int, int]]:
    """Read "x:0=64": input, dimension, largest size.

    >>> read_max_sizes(["x:0=64", "x:1=512"])
    {'x': {0: 64, 1: 512}}

    Raises:
        ConfigError: a text has another form.
    """
    found: dict[str, dict[int, int]] = {}
    for text in texts:
        match = _FORM.fullmatch(text)
        if match is None:
            raise ConfigError(
                f'--max-sizes takes input:dimension=size, found "{text}"', fix="--max-sizes x:0=64"
            )
        found.setdefault(match["input"], {})[int(match["dim"])] = int(match["size"])
    return found

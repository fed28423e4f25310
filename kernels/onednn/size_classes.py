"""Classes of a product's sizes, by which its measured speed over float is kept."""

import math

from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.shape_classes import expected_sizes

_ROWS = (1, 4, 16, 128)
_WEIGHTS = (18, 20, 22)


def rows_of(match: Match) -> int | None:
    """The rows of the product; None if a size is symbolic."""
    rows = 1
    for size in match.nodes["op"].meta["val"].shape[:-1]:
        if type(size) is not int:
            return None
        rows *= size
    return rows


def expected_rows(match: Match) -> int | None:
    """The rows of the product, symbolic sizes as in the inputs of the export; None if not known."""
    sizes = expected_sizes(match.nodes["op"].meta["val"].shape[:-1])
    return None if sizes is None else math.prod(sizes)


def weight_elements(match: Match) -> int:
    """The elements of the match's weight."""
    return int(match.node("w").meta["val"].numel())


def sizes_of(rows: int | None, weight: int) -> str:
    """The sizes of a product of so many rows by a weight of so many elements.

    Args:
        rows: None if their number is not known, not even of an example: the class is as fast as
            the slowest of its weight.
        weight: elements.

    >>> sizes_of(16, 768 * 768), sizes_of(None, 2**22)
    ('weight < 2^20, M <= 16', 'weight >= 2^22, any M')
    """
    kind = next((f"< 2^{p}" for p in _WEIGHTS if weight < 2**p), f">= 2^{_WEIGHTS[-1]}")
    most = next((f"M <= {m}" for m in _ROWS if rows is not None and rows <= m), f"M > {_ROWS[-1]}")
    return f"weight {kind}, {'any M' if rows is None else most}"

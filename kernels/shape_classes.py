"""The shape class of a match by one of its sizes: its entry in the tables of tiles and speeds."""

import math
from collections.abc import Sequence

import torch
from torch.fx import Node

from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.tiles import columns_class, elements_class, rows_class


def static_product(sizes: Sequence[object]) -> int | None:
    """The product of sizes; None if one is symbolic."""
    known = [size for size in sizes if isinstance(size, int)]
    return math.prod(known) if len(known) == len(sizes) else None


def expected_sizes(sizes: Sequence[int | torch.SymInt]) -> tuple[int, ...] | None:
    """Sizes, symbolic ones as in the example inputs of the export; None if one is not known.

    What is slower for one row may be twice as fast for a hundred: the example says which it is.
    """
    found = [_expected(size) for size in sizes]
    known = tuple(size for size in found if size is not None)
    return known if len(known) == len(found) else None


def _expected(size: int | torch.SymInt) -> int | None:
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else None
    return int(size)


def by_elements(match: Match) -> str:
    """The class by the number of elements of a match's result; "" if a size is symbolic."""
    elements = static_product(_result(match).meta["val"].shape)
    return "" if elements is None else elements_class(elements)


def by_columns(match: Match) -> str:
    """The class by the last size of a match's result; "" if it is symbolic."""
    columns = static_product(_result(match).meta["val"].shape[-1:])
    return "" if columns is None else columns_class(columns)


def by_rows(match: Match) -> str:
    """The class by the rows of the product that a match named "op"; "" if one is symbolic."""
    rows = static_product(match.nodes["op"].meta["val"].shape[:-1])
    return "" if rows is None else rows_class(rows)


def _result(match: Match) -> Node:
    return match.anchor

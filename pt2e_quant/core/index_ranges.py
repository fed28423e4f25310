"""The values that integer inputs may have, because the graph looks up rows of tables with them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

IndexRange = tuple[int, int]
"""The least and the greatest valid value."""

aten = torch.ops.aten

_SAME_VALUES: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.permute.default,
        aten.transpose.int,
        aten.t.default,
        aten.contiguous.default,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.detach_.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten._to_copy.default,
    }
)
"""Operators whose result has every value of their first argument, if it is in integers again."""


def index_range(given: Node) -> IndexRange | None:
    """The values of an integer input for which no operator reads outside a tensor.

    Only operators that read every value of the input are known: of a slice, other values may be
    anything. None if there is no such operator.
    """
    if not _is_integer(given):
        return None
    low, high = -(2**63), 2**63 - 1
    waiting, seen = [given], {given}
    while waiting:
        value = waiting.pop()
        for reader in value.users:
            for least, greatest in _read_at(reader, value):
                low, high = max(low, least), min(high, greatest)
            if reader.target in _SAME_VALUES and reader.args[0] is value and _is_integer(reader):
                if reader not in seen:
                    seen.add(reader)
                    waiting.append(reader)
    return None if high == 2**63 - 1 else (low, high)


def _read_at(reader: Node, value: Node) -> Iterable[IndexRange]:
    """The ranges in which an operator takes a value as indices."""
    args: Any = reader.args
    if reader.target in (aten.embedding.default, aten.embedding_bag.default):
        if args[1] is value:
            yield from _places(args[0], 0, is_negative_taken=False)
    elif reader.target in (aten.index_select.default, aten.gather.default):
        if args[2] is value:
            yield from _places(args[0], args[1], is_negative_taken=False)
    elif reader.target is aten.index.Tensor:
        for dim, index in enumerate(args[1]):
            if index is value:
                yield from _places(args[0], dim, is_negative_taken=True)


def _places(of: Node, dim: int, *, is_negative_taken: bool) -> Iterable[IndexRange]:
    held = of.meta.get("val")
    count = held.shape[dim] if isinstance(held, Tensor) and held.dim() else None
    if type(count) is int:
        yield (-count if is_negative_taken else 0), count - 1


def _is_integer(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, Tensor)
        and not value.is_floating_point()
        and not value.is_complex()
        and value.dtype is not torch.bool
    )

"""Two ways to run a definition: on tensors, or as nodes of a graph.

Each operator of this package is written once, as a sequence of `call(operator, *arguments)`. With
`compute` it runs on tensors and is the oracle; with a caller that inserts nodes it is the graph.
What an operator makes and one other reads is changed in place, which halves the memory traffic.
"""

from typing import Any, Protocol, TypeVar

import torch
from torch._higher_order_ops.out_dtype import out_dtype

__all__ = ["WIDE", "Call", "Value", "cast", "compute", "out_dtype", "widen"]

Value = TypeVar("Value")
"""A tensor, or the node that holds one."""

_aten: Any = torch.ops.aten

WIDE = {1: torch.int16, 2: torch.int32, 4: torch.int64}
"""The dtype of twice so many bytes."""


_Made = TypeVar("_Made", covariant=True)


class Call(Protocol[_Made]):
    """Calls an operator on values and literals."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> _Made:
        """The operator's one result."""
        ...


def compute(target: Any, *args: Any, **kwargs: Any) -> Any:
    """Call on tensors."""
    return target(*args, **kwargs)


def cast(call: Call[Value], x: Value, dtype: torch.dtype) -> Value:
    """A value in another dtype."""
    return call(_aten._to_copy.default, x, dtype=dtype)


def widen(call: Call[Value], x: Value, zero_point: int | Value, storage: torch.dtype) -> Value:
    """The difference x - zero_point in twice the width of its storage, where it cannot overflow.

    Args:
        call: how to compute.
        x: integers of dtype storage.
        zero_point: one integer, or integers that broadcast against x.
        storage: int8, uint8, int16 or int32.
    """
    wide = cast(call, x, WIDE[storage.itemsize])
    if isinstance(zero_point, int) and zero_point == 0:
        return wide
    return call(_aten.sub_.Tensor, wide, zero_point)

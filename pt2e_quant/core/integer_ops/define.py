"""The integer operators of our own: the one table of `pt2e_quant::integer_…`.

torch's `out_dtype` says an integer product of an ATen operator; what it cannot say is here. Each
has a kernel, which is its definition, and a fake kernel. All take and give integers, so that none
has a gradient of its own: training goes through the float twin of the form that wrote the
operator (`passes.reference.forms.site`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerOp:
    """One operator of our own.

    Attributes:
        name: after `pt2e_quant::`.
        overload: what a graph calls.
        kernel: its definition, on tensors.
        fake: its kernel on fake tensors.
    """

    name: str
    overload: OpOverload
    kernel: Callable[..., Tensor]
    fake: Callable[..., Tensor]


def like_input(x: Tensor, *rest: object) -> Tensor:
    """The fake kernel of an operator that gives the sizes of x in the dtype it is told last."""
    dtype = rest[-1]
    assert isinstance(dtype, torch.dtype)
    return torch.empty_like(x, dtype=dtype)


INTEGER_OPS: dict[str, IntegerOp] = {}
"""The operators by name; `define_integer_op` alone adds to it."""


def define_integer_op(
    schema: str, kernel: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> OpOverload:
    """Register `pt2e_quant::<schema>`.

    Args:
        schema: "integer_x(Tensor x, …) -> Tensor".
        kernel: its definition; runs on every device.
        fake: the result's shape and dtype on fake tensors.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema)  # type: ignore[no-untyped-call]  # torch's own
    torch.library.impl(_LIBRARY, name, "CompositeExplicitAutograd")(kernel)
    torch.library.register_fake(f"pt2e_quant::{name}", lib=_LIBRARY)(fake)
    packet: Any = getattr(torch.ops.pt2e_quant, name)
    INTEGER_OPS[name] = IntegerOp(name=name, overload=packet.default, kernel=kernel, fake=fake)
    overload: OpOverload = packet.default
    return overload

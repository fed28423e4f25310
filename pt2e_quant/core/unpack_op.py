"""The operator `pt2e_quant::unpack`: packed bytes to integers, inside a graph.

It stands between a constant and the dequantize that reads it (see `core.packing` for the format),
so that a module, and a file of it, hold a weight of b bits in b bits. The zero points of a
group-wise weight go through it too: dtype gives them back as the integers a dequantize takes.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import DTYPES, DTypeInfo
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import check_packed, unpack

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "unpack(Tensor packed, int bits, bool is_signed, SymInt[] shape, "
    "*, ScalarType? dtype=None) -> Tensor"
)

_BY_WIDTH = {(limits.bits, limits.signed): limits for limits in DTYPES.values() if limits.bits <= 8}


def _limits(bits: int, is_signed: bool) -> DTypeInfo:
    limits = _BY_WIDTH.get((bits, is_signed))
    if limits is None:
        raise ConfigError(f"pt2e_quant::unpack takes 1 to 8 bits, found {bits}")
    return limits


def _run(
    packed: Tensor,
    bits: int,
    is_signed: bool,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    values = unpack(packed, _limits(bits, is_signed).dtype, shape)
    return values if dtype is None else values.to(dtype)


def _fake(
    packed: Tensor,
    bits: int,
    is_signed: bool,
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> Tensor:
    limits = _limits(bits, is_signed)
    check_packed(packed, limits, shape)
    return packed.new_empty(tuple(shape), dtype=dtype or limits.storage)


# Plain torch, so one kernel serves every device; integers have no gradient.
torch.library.impl(_LIBRARY, "unpack", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::unpack", lib=_LIBRARY)(_fake)

Unpack = torch.ops.pt2e_quant.unpack.default


def is_unpack(node: Node) -> bool:
    """True if a node unpacks a constant."""
    return node.op == "call_function" and node.target is Unpack


def unpacked_dtype(node: Node) -> torch.dtype:
    """The dtype that the constant of an unpack node is packed as: int4, say."""
    bits, is_signed = node.args[1:3]
    return _limits(int(bits), bool(is_signed)).dtype  # type: ignore[arg-type]  # literals by schema

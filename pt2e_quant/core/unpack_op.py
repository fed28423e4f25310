"""The operator `pt2e_quant::unpack`: packed bytes to integers, inside a graph.

It stands between a uint8 constant and the dequantize that reads it (see `core.packing` for the
format), so that a module, and a file of it, hold a weight of b bits in b bits.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import DTYPES, DTypeInfo
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import check_packed, unpack

__all__ = ["Unpack", "is_unpack", "unpacked_dtype"]

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "unpack(Tensor packed, int bits, bool is_signed, SymInt[] shape) -> Tensor"
)

_BY_WIDTH = {(row.bits, row.signed): row for row in DTYPES.values() if row.is_sub_byte}


def _row(bits: int, is_signed: bool) -> DTypeInfo:
    row = _BY_WIDTH.get((bits, is_signed))
    if row is None:
        raise ConfigError(f"pt2e_quant::unpack takes 1 to 7 bits, found {bits}")
    return row


def _run(packed: Tensor, bits: int, is_signed: bool, shape: Sequence[int]) -> Tensor:
    return unpack(packed, _row(bits, is_signed).dtype, shape)


def _fake(packed: Tensor, bits: int, is_signed: bool, shape: Sequence[int]) -> Tensor:
    row = _row(bits, is_signed)
    check_packed(packed, row, shape)
    return packed.new_empty(tuple(shape), dtype=row.storage)


# Plain torch, so one kernel serves every device; integers have no gradient.
torch.library.impl(_LIBRARY, "unpack", "CompositeExplicitAutograd")(_run)
torch.library.register_fake("pt2e_quant::unpack", lib=_LIBRARY)(_fake)

Unpack = torch.ops.pt2e_quant.unpack.default


def is_unpack(node: Node) -> bool:
    """Whether a node unpacks a sub-byte constant."""
    return node.op == "call_function" and node.target is Unpack


def unpacked_dtype(node: Node) -> torch.dtype:
    """The sub-byte dtype of the integers that an unpack node gives."""
    _, bits, is_signed, _ = node.args
    return _row(int(bits), bool(is_signed)).dtype  # type: ignore[arg-type]  # literals by schema

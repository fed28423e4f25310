"""Integers of less than 8 bits in a buffer that a graph writes: packed along the last axis.

`pt2e_quant::pack_rows` and `pt2e_quant::unpack_rows` keep every axis but the last, so that a write
at a position of a cache is one of the same axes in its packed form. A row is in the format of
`core.packing`.
"""

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import DTYPES
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.packing import pack, unpack

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "pack_rows(Tensor values, int bits, bool is_signed) -> Tensor"
)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "unpack_rows(Tensor packed, int bits, bool is_signed) -> Tensor"
)

_BY_WIDTH = {(limits.bits, limits.signed): limits for limits in DTYPES.values() if limits.bits < 8}


def pack_rows(values: Tensor, bits: int, is_signed: bool) -> Tensor:
    """uint8[..., N * bits / 8] of integers [..., N].

    Raises:
        ConfigError: N values of this width do not fill whole bytes.
    """
    _check(values.shape[-1] * bits % 8 == 0, f"{values.shape[-1]} values of {bits} bits")
    packed = pack(values.reshape(-1, values.shape[-1]), _BY_WIDTH[bits, is_signed].dtype)
    return packed.reshape(*values.shape[:-1], packed.shape[-1])


def unpack_rows(packed: Tensor, bits: int, is_signed: bool) -> Tensor:
    """The integers [..., N] that `pack_rows` made uint8[..., N * bits / 8] of.

    Raises:
        ConfigError: the bytes of a row hold no whole number of values.
    """
    _check(packed.shape[-1] * 8 % bits == 0, f"{packed.shape[-1]} bytes for {bits} bits")
    flat = packed.reshape(-1, packed.shape[-1])
    shape = flat.shape[0], packed.shape[-1] * 8 // bits
    values = unpack(flat, _BY_WIDTH[bits, is_signed].dtype, shape)
    return values.reshape(*packed.shape[:-1], shape[1])


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise ConfigError(f"{what} in a row are no whole number", fix="use 4 bits, or 8")


def _fake_pack(values: Tensor, bits: int, is_signed: bool) -> Tensor:
    _check(values.shape[-1] * bits % 8 == 0, f"{values.shape[-1]} values of {bits} bits")
    shape = *values.shape[:-1], values.shape[-1] * bits // 8
    return values.new_empty(shape, dtype=torch.uint8)


def _fake_unpack(packed: Tensor, bits: int, is_signed: bool) -> Tensor:
    _check(packed.shape[-1] * 8 % bits == 0, f"{packed.shape[-1]} bytes for {bits} bits")
    shape = *packed.shape[:-1], packed.shape[-1] * 8 // bits
    return packed.new_empty(shape, dtype=_BY_WIDTH[bits, is_signed].storage)


torch.library.impl(_LIBRARY, "pack_rows", "CompositeExplicitAutograd")(pack_rows)
torch.library.impl(_LIBRARY, "unpack_rows", "CompositeExplicitAutograd")(unpack_rows)
torch.library.register_fake("pt2e_quant::pack_rows", lib=_LIBRARY)(_fake_pack)
torch.library.register_fake("pt2e_quant::unpack_rows", lib=_LIBRARY)(_fake_unpack)

PackRows = torch.ops.pt2e_quant.pack_rows.default
UnpackRows = torch.ops.pt2e_quant.unpack_rows.default


def is_pack_rows(node: Node) -> bool:
    """True if a node packs integers for a buffer."""
    return node.op == "call_function" and node.target is PackRows

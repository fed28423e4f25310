"""The operator `pt2e_quant::pack_int4_limbs`: 4-bit codes to a packed int8 limb of the weight.

A program holds the codes alone, half a byte a weight, and makes both limbs of them.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.int4_linear.few_rows_op import unpack_pairs
from pt2e_quant.kernels.onednn.limbs_op import weight_limbs
from pt2e_quant.kernels.onednn.operators import PackLinear

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def dequantize(pairs: Tensor, scale: Tensor, zero_point: Tensor) -> Tensor:
    """(code - zero_point) * scale in float32[N, K], as the canonical graph computes it."""
    codes = unpack_pairs(pairs)
    steps = codes.to(torch.float32).view(*scale.shape, -1) - zero_point.unsqueeze(-1)
    return (steps * scale.unsqueeze(-1)).view(codes.shape)


def _pack(pairs: Tensor, scale: Tensor, zero_point: Tensor, is_high: bool) -> Tensor:
    high, low, _ = weight_limbs(dequantize(pairs, scale, zero_point))
    packed: Tensor = PackLinear(high if is_high else low, None)
    return packed


def _fake(pairs: Tensor, scale: Tensor, zero_point: Tensor, is_high: bool) -> Tensor:
    columns, half = pairs.shape
    return pairs.new_empty((2 * half, columns), dtype=torch.int8)


_LIBRARY.define(  # type: ignore[no-untyped-call]
    "pack_int4_limbs(Tensor pairs, Tensor scale, Tensor zero_point, bool is_high) -> Tensor"
)
torch.library.impl(_LIBRARY, "pack_int4_limbs", "CompositeExplicitAutograd")(_pack)
torch.library.register_fake("pt2e_quant::pack_int4_limbs", lib=_LIBRARY)(_fake)

PackInt4Limbs: Any = torch.ops.pt2e_quant.pack_int4_limbs.default
"""One of the two `weight_limbs` of a weight in groups, packed by oneDNN.

    pairs: uint8[N, K / 2], codes in the format of `core.packing`.
    scale: float32[N, K / group_size].
    zero_point: uint8[N, K / group_size], codes.
    is_high: which limb.
"""

"""The operator `pt2e_quant::linear_of_int4`: a few rows times 4-bit weights in groups, on CPUs.

torch's `_weight_int4pack_mm_for_cpu` in bfloat16: up to four rows it reads an eighth of what
float32 reads and is the fastest there is; with more rows it unpacks each weight once a row, and
with float32 or float16 activations it measured 5 to 100 times slower than float.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.packing import unpack
from pt2e_quant.kernels.int4_linear.pack import OFFSET
from pt2e_quant.kernels.onednn.limbs_op import check_float32
from pt2e_quant.kernels.onednn.operators import aten

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own

UINT4: torch.dtype = getattr(torch, "uint4")  # noqa: B009  # torch's stubs do not list it
FEW_ROWS = 4
"""Up to which the operator measured faster than what else there is."""
_TILE = 16
"""Rows of a weight that it packs together."""
BFLOAT16_ERROR = 2.0**-8
"""Half a step of bfloat16, of the value."""


def scales_and_zeros(scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The operator's operand: bfloat16[K / group_size, N, 2], N padded to a multiple of 16.

    It computes (code - 8) * scale + zero, so zero is (8 - zero_point) * scale.

    Args:
        scale: float[N, K / group_size].
        zero_point: codes, int32[N, K / group_size]; None for 8 everywhere.
    """
    rounded = scale.to(torch.bfloat16)
    steps = torch.zeros_like(scale) if zero_point is None else OFFSET - zero_point.to(scale.dtype)
    zeros = (steps.float() * rounded.float()).to(torch.bfloat16)
    both = torch.stack([rounded.t(), zeros.t()], dim=-1)
    return torch.nn.functional.pad(both, (0, 0, 0, -len(scale) % _TILE)).contiguous()


def error_bound(
    x: Tensor, codes: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the bound of the operator's error against the exact sums: float64[M, N].

    Activations, scales, zeros, weights and the result are rounded to bfloat16, each by 2^-8 of
    itself; sums are float32.

    Args:
        x: float32[M, K], finite.
        codes: uint8[N, K] from 0 to 15.
        scale: float[N, K / group_size].
        zero_point: codes, int32[N, K / group_size]; None for 8 everywhere.
        bias: float32[N] or None.
    """
    group_size = codes.shape[1] // scale.shape[1]
    each = scale.double().abs().repeat_interleave(group_size, 1)
    zeros = torch.full_like(scale, OFFSET) if zero_point is None else zero_point
    zeros = zeros.double().repeat_interleave(group_size, 1)
    weight = (codes.double() - zeros).abs() * each
    shifted = (OFFSET - zeros).abs() * each
    # Four roundings of each product, with room for what they do to each other and for the sums.
    found = x.double().abs() @ (4.1 * BFLOAT16_ERROR * weight + 1.1 * BFLOAT16_ERROR * shifted).t()
    return found if bias is None else found + 2.0**-22 * bias.double().abs()


def unpack_pairs(pairs: Tensor) -> Tensor:
    """Codes uint8[N, K] of bytes uint8[N, K / 2]."""
    return unpack(pairs, UINT4, (pairs.shape[0], 2 * pairs.shape[1]))


def _pack(pairs: Tensor) -> Tensor:
    return _pack_codes(unpack_pairs(pairs))


def _pack_codes(codes: Tensor) -> Tensor:
    padded = aten.constant_pad_nd.default(codes, [0, 0, 0, -codes.shape[0] % _TILE])
    made: Tensor = aten._convert_weight_to_int4pack_for_cpu.default(
        aten.to.dtype(padded, torch.int32), 1
    )
    return made


def _fake_pack(pairs: Tensor) -> Tensor:
    columns, half = pairs.shape
    return pairs.new_empty((columns + -columns % _TILE, half))


def _fake_pack_codes(codes: Tensor) -> Tensor:
    columns, depth = codes.shape
    return codes.new_empty((columns + -columns % _TILE, depth // 2))


def linear_of_int4(
    x: Tensor,
    packed: Tensor,
    group_size: int,
    scales: Tensor,
    columns: int,
    bias: Tensor | None = None,
) -> Tensor:
    """A few float32 rows times packed codes; see `LinearOfInt4`.

    Raises:
        UnsupportedError: the activations are not float32.
    """
    check_float32("linear_of_int4", x)
    rows = aten.to.dtype(aten.detach.default(x), torch.bfloat16)
    rows = aten.reshape.default(rows, [-1, x.shape[-1]])
    rows = aten.contiguous.default(rows)
    found = aten._weight_int4pack_mm_for_cpu.default(rows, packed, group_size, scales)
    found = aten.to.dtype(aten.slice.Tensor(found, 1, 0, columns), torch.float32)
    found = aten.reshape.default(found, [*x.shape[:-1], columns])
    made: Tensor = found if bias is None else aten.add.Tensor(found, bias)
    return made


_LIBRARY.define("pack_int4_linear(Tensor pairs) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "pack_int4_linear", "CompositeExplicitAutograd")(_pack)
torch.library.register_fake("pt2e_quant::pack_int4_linear", lib=_LIBRARY)(_fake_pack)
_LIBRARY.define("pack_int4_codes(Tensor codes) -> Tensor")  # type: ignore[no-untyped-call]
torch.library.impl(_LIBRARY, "pack_int4_codes", "CompositeExplicitAutograd")(_pack_codes)
torch.library.register_fake("pt2e_quant::pack_int4_codes", lib=_LIBRARY)(_fake_pack_codes)
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "linear_of_int4(Tensor x, Tensor packed, int group_size, Tensor scales, int columns, "
    "Tensor? bias=None) -> Tensor"
)
# Implicit, so that exporters and compilers see the calls it is made of.
torch.library.impl(_LIBRARY, "linear_of_int4", "CompositeImplicitAutograd")(linear_of_int4)

PackInt4: Any = torch.ops.pt2e_quant.pack_int4_linear.default
"""Codes as `core.packing` stores them, uint8[N, K / 2], to the layout of torch's operator here.

N is filled up to sixteens.
"""
PackInt4Codes: Any = torch.ops.pt2e_quant.pack_int4_codes.default
"""The same of codes that are not in pairs: uint8[N, K]."""
LinearOfInt4: Any = torch.ops.pt2e_quant.linear_of_int4.default
"""y = x @ W.t() + bias within `error_bound`, with W = (code - zero_point) * scale.

    x: float32[..., K], finite.
    packed: `PackInt4` of the codes.
    group_size: 32, 64, 128 or 256, a divisor of K.
    scales: of `scales_and_zeros`.
    columns: N.
    bias: float32[N].
"""

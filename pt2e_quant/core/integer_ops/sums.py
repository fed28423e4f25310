"""Sums of quantized tensors: add, and averages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import Call, Value, cast, out_dtype, widen
from pt2e_quant.core.integer_ops.define import define_integer_op
from pt2e_quant.core.integer_ops.profiles import Requantization
from pt2e_quant.core.integer_ops.requantize import Factor, OutputRange, byte_offset

_aten: Any = torch.ops.aten
_BITS = 31
_MAX_SHIFT = 61
"""Two products of 17-bit differences and 31-bit multipliers, and half a step, fit in an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonShift:
    """Two factors as multiplier * 2**-shift with one shift.

    Args:
        first: its size is at most 2**31 - 1.
        second: likewise.
        shift: 1 .. 61.
    """

    first: int
    second: int
    shift: int


def common_shift(first: float, second: float, bits: int = _BITS) -> CommonShift | None:
    """The factors with the greater one exact to so many bits; None if one is 2**30 or more.

    With 31 bits they are rounded to the nearest, ties up. With 21 it is XNNPACK's
    xnn_init_qs8_add_minmax_scalar_params: ties to even.

    >>> common_shift(0.5, 0.25)
    CommonShift(first=1073741824, second=536870912, shift=31)
    """
    size = max(abs(first), abs(second))
    if not math.isfinite(size):
        return None
    shift = min(bits - math.frexp(size)[1], _MAX_SHIFT)
    if shift < 1:
        return None
    top = (1 << bits) - 1 if bits == _BITS else 1 << bits
    scaled = (_nearest(abs(f) * 2.0**shift, bits) for f in (first, second))
    values = [
        min(v, top) * (-1 if f < 0 else 1) for v, f in zip(scaled, (first, second), strict=True)
    ]
    return CommonShift(first=values[0], second=values[1], shift=shift)


def _nearest(value: float, bits: int) -> int:
    return math.floor(value + 0.5) if bits == _BITS else round(value)


def add(
    call: Call[Value],
    x: Value,
    y: Value,
    factors: CommonShift,
    out: OutputRange,
    *,
    zero_points: tuple[int, int],
    storages: tuple[torch.dtype, torch.dtype],
) -> Value:
    """The sum x + y in integers of the output's scale: one rounding, ties up, no float.

    Args:
        call: how to compute.
        x: integers of 8 or 16 bits.
        y: integers that broadcast against x.
        factors: x's scale and y's over the output's; y's is negative for a difference.
        out: of the result; low is its zero_point where a relu follows.
        zero_points: of x and y.
        storages: dtypes of x and y.
    """
    pairs = zip((x, y), zero_points, storages, (factors.first, factors.second), strict=True)
    left, right = (
        call(out_dtype, _aten.mul.Tensor, torch.int64, widen(call, v, zero, kind), factor)
        for v, zero, kind, factor in pairs
    )
    total = call(_aten.add.Tensor, left, right)
    half = call(_aten.add_.Tensor, total, 1 << (factors.shift - 1))
    steps = call(_aten.bitwise_right_shift_.Tensor_Scalar, half, factors.shift)
    if out.zero_point:
        steps = call(_aten.add_.Tensor, steps, out.zero_point)
    return cast(call, call(_aten.clamp_.default, steps, out.low, out.high), out.storage)


def add_by_ratios(
    call: Call[Value],
    x: Value,
    y: Value,
    ratios: tuple[float, float],
    out: OutputRange,
    *,
    zero_points: tuple[int, int],
    storages: tuple[torch.dtype, torch.dtype],
) -> Value:
    """The sum as ONNX Runtime has it: fused multiply-adds in float32 on uint8, half to even.

    A fused multiply-add rounds once: its product and sum are taken in float64 here. The constant
    has one too: its compiler fuses the first of the two products with their sum.

    Args:
        call: how to compute.
        x: integers of 8 bits.
        y: integers that broadcast against x.
        ratios: x's scale and y's over the output's, in float32; a negative one subtracts.
        out: of the result.
        zero_points: of x and y.
        storages: dtypes of x and y.
    """
    pairs = zip((x, y), zero_points, storages, ratios, strict=True)
    (left, left_zero), (right, right_zero) = (_as_byte(call, *pair) for pair in pairs)
    first, second = (torch.tensor(abs(r), dtype=torch.float32) for r in ratios)
    offset = byte_offset(out.storage)
    zeros = first.double() * left_zero + (second * right_zero).double()
    total: Any = float(out.zero_point + offset - zeros.float())
    for value, ratio in ((right, second), (left, first)):
        product = call(_aten.mul.Tensor, value, float(ratio))
        total = cast(call, call(_aten.add.Tensor, product, total), torch.float32)
        total = cast(call, total, torch.float64)
    steps = call(_aten.sub_.Tensor, call(_aten.round_.default, total), offset)
    return cast(call, call(_aten.clamp_.default, steps, out.low, out.high), out.storage)


def _as_byte(
    call: Call[Value], value: Value, zero_point: int, storage: torch.dtype, ratio: float
) -> tuple[Value, int]:
    """A uint8 in float64 and its zero_point; the complements of both stand for the negative."""
    offset = byte_offset(storage)
    real = cast(call, value, torch.float64)
    if ratio < 0:
        return call(_aten.rsub.Scalar, real, 255 - offset), 255 - offset - zero_point
    return call(_aten.add.Tensor, real, offset), zero_point + offset


def add_up(
    call: Call[Value],
    x: Value,
    dims: Sequence[int],
    *,
    keepdim: bool,
    zero_point: int,
    storage: torch.dtype,
    accumulator: torch.dtype = torch.int32,
) -> Value:
    """The sum of (x - zero_point) over dims, which a requantize makes a sum or an average."""
    wide = cast(call, widen(call, x, zero_point, storage), accumulator)
    return call(_aten.sum.dim_IntList, wide, list(dims), keepdim, dtype=accumulator)


def _divide(total: Tensor, count: Tensor) -> Tensor:
    """Total / count with ties away from zero (TFLite, reference_integer_ops::AveragePool)."""
    half = torch.where(total > 0, count // 2, -(count // 2))
    return torch.div(total + half, count, rounding_mode="trunc")


def _fake_divide(total: Tensor, count: Tensor) -> Tensor:
    return total + count


Divide = define_integer_op(
    "integer_divide(Tensor total, Tensor count) -> Tensor", _divide, _fake_divide
)
"""A sum over its count of terms, in integers."""


def reciprocal_of(counts: Tensor) -> Factor[Tensor]:
    """The factor 1 / count as TOSA's reciprocal_scale has it (AVG_POOL2D).

    Args:
        counts: int64, 1 .. 2**31 - 1.

    >>> [int(v) for v in reciprocal_of(torch.tensor([9])).values]
    [1908874355, 34]
    """
    bits = torch.tensor([(count - 1).bit_length() for count in counts.flatten().tolist()])
    bits = bits.reshape(counts.shape)
    values = ((1 << 30) + 1 << bits) // counts, bits + 30
    return Factor(kind=Requantization.SINGLE, values=values)


def divided(call: Call[Value], total: Value, count: Value, out: OutputRange) -> Value:
    """The average of integers of the output's own scale.

    Args:
        call: how to compute.
        total: int32 sum of the integers as they are stored, zero_point and all.
        count: int32 terms of each sum, broadcasts against it.
        out: of the result.
    """
    average = call(Divide, total, count)
    return cast(call, call(_aten.clamp_.default, average, out.low, out.high), out.storage)

"""Sums of quantized tensors: add, and averages."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import Call, Value, cast, out_dtype, widen
from pt2e_quant.core.integer_ops.requantize import OutputRange

__all__ = ["CommonShift", "add", "add_up", "common_shift"]

_aten: Any = torch.ops.aten
_BITS = 31
_MAX_SHIFT = 61
"""Two products of 17-bit differences and 31-bit multipliers, and half a step, fit in an int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonShift:
    """Two positive factors as multiplier * 2**-shift with one shift.

    Args:
        first: 0 .. 2**31 - 1.
        second: 0 .. 2**31 - 1.
        shift: 1 .. 61.
    """

    first: int
    second: int
    shift: int


def common_shift(first: float, second: float) -> CommonShift | None:
    """The factors with the greater one exact to 31 bits; None if one is 2**30 or more.

    >>> common_shift(0.5, 0.25)
    CommonShift(first=1073741824, second=536870912, shift=31)
    """
    _, exponent = math.frexp(max(first, second))
    shift = min(_BITS - exponent, _MAX_SHIFT)
    if shift < 1 or not math.isfinite(first + second):
        return None
    top = (1 << _BITS) - 1
    scaled = (min(math.floor(f * 2.0**shift + 0.5), top) for f in (first, second))
    return CommonShift(first=next(scaled), second=next(scaled), shift=shift)


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
        factors: x's scale and y's over the output's.
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
    half = call(_aten.add.Tensor, total, 1 << (factors.shift - 1))
    steps = call(_aten.bitwise_right_shift.Tensor_Scalar, half, factors.shift)
    if out.zero_point:
        steps = call(_aten.add.Tensor, steps, out.zero_point)
    return cast(call, call(_aten.clamp.default, steps, out.low, out.high), out.storage)


def add_up(
    call: Call[Value],
    x: Value,
    dims: Sequence[int],
    *,
    keepdim: bool,
    zero_point: int,
    storage: torch.dtype,
) -> Value:
    """The sum of (x - zero_point) over dims in int32, which a requantize makes an average."""
    wide = cast(call, widen(call, x, zero_point, storage), torch.int32)
    return call(_aten.sum.dim_IntList, wide, list(dims), keepdim, dtype=torch.int32)

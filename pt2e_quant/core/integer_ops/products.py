"""Sums of products in int32: linear and convolutions; quotients."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import Call, Value, out_dtype, widen
from pt2e_quant.core.integer_ops.define import define_integer_op
from pt2e_quant.core.integer_ops.windows import Convolution, Matmul

_aten: Any = torch.ops.aten


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How a convolution moves: one number for each spatial dimension.

    With an output_padding it is a transposed one.
    """

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    groups: int = 1
    output_padding: Sequence[int] | None = None


def multiply_rows(
    call: Call[Value],
    x: Value,
    weight: Value,
    bias: Value | None,
    *,
    x_zero_point: int | Value,
    weight_zero_point: int | Value,
    x_storage: torch.dtype,
    weight_storage: torch.dtype,
    bits: int = 32,
) -> Value:
    """sum_k (x - x_zero_point) * (weight - weight_zero_point) + bias, exact in int32.

    Args:
        call: how to compute.
        x: integers [..., K].
        weight: integers [N, K].
        bias: int32[N] in steps of input scale * weight scale.
        x_zero_point: one integer.
        weight_zero_point: one integer, or [N, 1].
        x_storage: dtype of x.
        weight_storage: dtype of weight.
        bits: of the accumulator, 32 or 64.

    Returns:
        int32[..., N] or int64. K must be at most `core.integer.longest_inner_axis` for 32 bits.
    """
    left = widen(call, x, x_zero_point, x_storage)
    right = widen(call, weight, weight_zero_point, weight_storage)
    if bits == 64:
        total = call(Matmul, left, call(_aten.t.default, right), bits)
    else:
        total = call(out_dtype, _aten.linear.default, torch.int32, left, right, None)
    return total if bias is None else call(_aten.add_.Tensor, total, bias)


def convolve(
    call: Call[Value],
    x: Value,
    weight: Value,
    bias: Value | None,
    window: Window,
    *,
    x_zero_point: int | Value,
    weight_zero_point: int | Value,
    x_storage: torch.dtype,
    weight_storage: torch.dtype,
    bits: int = 32,
) -> Value:
    """The convolution of (x - x_zero_point) and (weight - weight_zero_point), exact in int32.

    Padding is zeros after the zero_point is taken off, so it stands for 0.0.

    Args:
        call: how to compute.
        x: integers [N, C, *spatial].
        weight: integers [O, C / groups, *kernel].
        bias: int32 that broadcasts against the result, in steps of input scale * weight scale.
        window: how it moves.
        x_zero_point: one integer.
        weight_zero_point: one integer, or one for each output channel, shaped to broadcast.
        x_storage: dtype of x.
        weight_storage: dtype of weight.
        bits: of the accumulator, 32 or 64.

    Returns:
        int32[N, O, *spatial], or int64.
    """
    left = widen(call, x, x_zero_point, x_storage)
    right = widen(call, weight, weight_zero_point, weight_storage)
    rank = len(window.stride)
    moved = [list(m) for m in (window.stride, window.padding, window.dilation)]
    is_plain = rank < 3 and all(d == 1 for d in window.dilation) and bits == 32
    if is_plain and window.output_padding is None:
        rest = (None, *moved, False, [0] * rank, window.groups)
        total = call(out_dtype, _aten.convolution.default, torch.int32, left, right, *rest)
    else:  # torch has no integer kernel for these
        padded = [0] * rank if window.output_padding is None else list(window.output_padding)
        is_transposed = window.output_padding is not None
        rest = (*moved, is_transposed, padded, window.groups, bits)
        total = call(Convolution, left, right, *rest)
    return total if bias is None else call(_aten.add_.Tensor, total, bias)


def _quotient(
    x: Tensor,
    y: Tensor,
    multiplier: int,
    shift: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    left, right = x.long() * multiplier, y.long()
    whole = torch.div(left, torch.where(right == 0, 1, right), rounding_mode="floor")
    # Exact: floor((floor(a) + h) / 2**k) is floor((a + h) / 2**k) for an integer h.
    steps = ((whole + (1 << (shift - 1))) >> shift) + zero_point
    saturated = torch.where(left > 0, high, torch.where(left < 0, low, zero_point))
    return torch.where(right == 0, saturated, steps).clamp(low, high).to(dtype)


def _fake_quotient(x: Tensor, y: Tensor, *rest: object) -> Tensor:
    dtype = rest[-1]
    assert isinstance(dtype, torch.dtype)
    return (x + y).to(dtype)


Quotient = define_integer_op(
    "integer_quotient(Tensor x, Tensor y, int multiplier, int shift, int zero_point, int low, "
    "int high, ScalarType dtype) -> Tensor",
    _quotient,
    _fake_quotient,
)
"""x * multiplier / (y * 2**shift) + zero_point, ties up; x / 0 is a limit, 0 / 0 the zero_point."""

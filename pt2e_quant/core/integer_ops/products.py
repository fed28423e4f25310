"""Sums of products in int32: linear and convolutions; quotients; torch's out_dtype with a gradient.

`torch.ops.higher_order.out_dtype` raises "Autograd not implemented for out_dtype" where a tensor
requires a gradient (up to torch 2.13 at least). Integers have none, so `out_dtype` here takes
integers in float tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.out_dtype import ALLOWABLE_OPS

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.integer_ops.calls import Call, Value, widen
from pt2e_quant.core.integer_ops.calls import out_dtype as torch_out_dtype
from pt2e_quant.core.integer_ops.define import define_integer_op
from pt2e_quant.core.integer_ops.windows import Convolution, Matmul

_aten: Any = torch.ops.aten
_SUMS = (_aten.add.Tensor, _aten.sub.Tensor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The window of a convolution: one number for each spatial dimension.

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
        total = call(torch_out_dtype, _aten.linear.default, torch.int32, left, right, None)
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
        total = call(torch_out_dtype, _aten.convolution.default, torch.int32, left, right, *rest)
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


def out_dtype(op: Any, dtype: torch.dtype, *args: Any) -> Tensor:
    """`op` on integers, accumulated in dtype; float tensors that hold integers train.

    The forward pass is `torch.ops.higher_order.out_dtype` on the integers. The backward pass is
    that of the float operator at the same values (straight-through).

    Args:
        op: an operator that torch's out_dtype takes (mm, linear, convolution, mul); or add and
            sub, which it does not take: they are computed in dtype here.
        dtype: int32 or int64.
        args: of the operator. Values of float tensors are rounded to integers.

    Returns:
        Of dtype if no tensor among args is float; else float64 with the exact integers.

    Raises:
        UnsupportedError: dtype is no integer dtype, or op is another operator.

    >>> x = torch.tensor([[3.0, -2.0]], requires_grad=True)
    >>> w = torch.tensor([[5.0], [7.0]], requires_grad=True)
    >>> total = out_dtype(torch.ops.aten.mm.default, torch.int32, x, w)
    >>> total.backward()
    >>> total.item(), x.grad.tolist()
    (1.0, [[5.0, 7.0]])
    """
    if dtype not in (torch.int32, torch.int64):
        raise UnsupportedError(
            f"out_dtype trains with accumulators of int32 or int64, found {dtype}",
            fix="torch.ops.higher_order.out_dtype for other dtypes, without a gradient",
        )
    if op not in _SUMS and op not in ALLOWABLE_OPS:
        known = ", ".join(str(o) for o in (*ALLOWABLE_OPS, *_SUMS))
        raise UnsupportedError(f"out_dtype takes no {op}", fix=f"one of {known}")
    if not any(_is_float(a) for a in args):
        return _accumulated(op, dtype, args)
    integers = [a.detach().round().to(dtype) if _is_float(a) else a for a in args]
    exact = _accumulated(op, dtype, integers)
    # In float64 the operator is exact on integers, and so is this sum.
    estimate: Tensor = op(*(a.double() if isinstance(a, Tensor) else a for a in args))
    return estimate + (exact - estimate).detach()


def _accumulated(op: Any, dtype: torch.dtype, args: Sequence[Any]) -> Tensor:
    if op in _SUMS:
        summed: Tensor = op(*(a.to(dtype) if isinstance(a, Tensor) else a for a in args))
        return summed
    exact: Tensor = torch_out_dtype(op, dtype, *args)
    return exact


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()

"""ONNX for functions of ATen that torch's exporter has none for, or a wrong one."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset21

__all__ = ["function_translations"]

op: Any = opset21
"""onnxscript's operators; each call adds a node to the model being written."""

_TINY = 1e-38
"""Keeps a quotient finite where both sides are 0."""


def function_translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    aten = torch.ops.aten
    return {
        aten.hypot.default: hypot,
        aten.copysign.Tensor: copysign,
        aten.atan2.default: atan2,
        aten.rrelu.default: rrelu,
        aten.kthvalue.default: kthvalue,
        aten.median.dim: median,
        aten._cdist_forward.default: cdist,
    }


def hypot(x: ir.Value, y: ir.Value) -> ir.Value:
    """sqrt(x² + y²), scaled by the larger side so that no square overflows."""
    a, b = op.Abs(x), op.Abs(y)
    large, small = op.Max(a, b), op.Min(a, b)
    ratio = op.Div(small, op.Max(large, _like(_TINY, large)))
    squares = op.Add(_like(1.0, large), op.Mul(ratio, ratio))
    found: ir.Value = op.Mul(large, op.Sqrt(squares))
    return found


def copysign(x: ir.Value, y: ir.Value) -> ir.Value:
    """|x| with the sign of y."""
    size = op.Abs(x)
    found: ir.Value = op.Where(_is_negative(y), op.Neg(size), size)
    return found


def atan2(y: ir.Value, x: ir.Value) -> ir.Value:
    """The angle of (x, y), of y's sign: torch's own translation gives -pi for y = 0 and x < 0."""
    acute = op.Atan(op.Div(op.Abs(y), op.Max(op.Abs(x), _like(_TINY, x))))
    return copysign(op.Where(_is_negative(x), op.Sub(_like(math.pi, x), acute), acute), y)


def _is_negative(x: ir.Value) -> ir.Value:
    """Where x is below 0 or -0.0, which its reciprocal tells."""
    zero, one = _like(0.0, x), _like(1.0, x)
    found: ir.Value = op.Less(op.Where(op.Equal(x, zero), op.Div(one, x), x), zero)
    return found


def rrelu(
    x: ir.Value,
    lower: float = 0.125,
    upper: float = 1.0 / 3.0,
    training: bool = False,
    generator: object = None,
) -> ir.Value:
    """A leaky relu with the mean slope, as in evaluation.

    Raises:
        NotImplementedError: in training, whose slopes are drawn.
    """
    if training:
        raise NotImplementedError("rrelu in training draws its slopes")
    found: ir.Value = op.LeakyRelu(x, alpha=(lower + upper) / 2)
    return found


def kthvalue(
    x: ir.Value, k: int, dim: int = -1, keepdim: bool = False
) -> tuple[ir.Value, ir.Value]:
    """The k-th smallest values along a dimension, and where they are."""
    count = op.Constant(value_ints=[k])
    values, indices = op.TopK(x, count, axis=dim, largest=0, sorted=1)
    last = op.Constant(value_ints=[k - 1])
    made = [op.Gather(part, last, axis=dim) for part in (values, indices)]
    if not keepdim:
        axes = op.Constant(value_ints=[dim])
        made = [op.Squeeze(part, axes) for part in made]
    return made[0], made[1]


def median(x: ir.Value, dim: int, keepdim: bool = False) -> tuple[ir.Value, ir.Value]:
    """The lower of the two middle values along a dimension.

    Raises:
        NotImplementedError: the dimension's size is dynamic.
    """
    sizes: Sequence[object] = tuple(x.shape or ())
    size = sizes[dim] if sizes else None
    if not isinstance(size, int):
        raise NotImplementedError("a median over a dynamic dimension")
    return kthvalue(x, (size + 1) // 2, dim, keepdim)


def cdist(x: ir.Value, y: ir.Value, p: float, compute_mode: int | None) -> ir.Value:
    """Distances of the rows of x[..., P, M] and y[..., R, M] in the p-norm."""
    rows, columns = (op.Constant(value_ints=[axis]) for axis in (-2, -3))
    apart = op.Abs(op.Sub(op.Unsqueeze(x, rows), op.Unsqueeze(y, columns)))
    last = op.Constant(value_ints=[-1])
    if p == float("inf"):
        found: ir.Value = op.ReduceMax(apart, last, keepdims=0)
    elif p == 2:
        found = op.ReduceL2(apart, last, keepdims=0)
    elif p == 1:
        found = op.ReduceL1(apart, last, keepdims=0)
    else:
        total = op.ReduceSum(op.Pow(apart, _like(p, x)), last, keepdims=0)
        found = op.Pow(total, _like(1.0 / p, x))
    return found


def _like(value: float, x: ir.Value) -> ir.Value:
    found: ir.Value = op.CastLike(op.Constant(value_float=value), x)
    return found

"""ONNX for activations whose operators ONNX Runtime computes slowly, one value at a time.

On images they are 1.7 to 4.7 times as fast in these forms (`benchmarks/onnx_forms.py`), but a PRelu
of small ones.
"""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset21

from pt2e_quant.backends.onnx.values import typed

op: Any = opset21

_SATURATED = 20.0
"""Inputs from here on, for which mish is its input in float32; larger ones would overflow."""


def activation_translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    aten = torch.ops.aten
    return {
        aten.mish.default: mish,
        aten.prelu.default: prelu,
        aten.softplus.default: softplus,
    }


def mish(x: ir.Value) -> ir.Value:
    """X tanh(log(1 + e)), e = exp(x), which is x g / (g + 2) with g = e (e + 2)."""
    two = _like(2.0, x)
    exp = op.Exp(op.Min(x, _like(_SATURATED, x)))
    square = op.Mul(exp, op.Add(exp, two))
    return typed(op.Mul(x, op.Div(square, op.Add(square, two))))


def softplus(x: ir.Value, beta: float = 1.0, threshold: float = 20.0) -> ir.Value:
    """log(1 + exp(beta x)) / beta, as relu(x) + log(1 + exp(-|beta x|)) / beta.

    What 1 + u has lost of u is added as (u - ((1 + u) - 1)) / (1 + u): exact to the last bits.
    Nothing overflows, so that the threshold, beyond which torch gives x itself, has no use.
    """
    del threshold
    one = _like(1.0, x)
    scaled = x if beta == 1 else op.Mul(x, _like(float(beta), x))
    small = op.Exp(op.Neg(op.Abs(scaled)))
    whole = op.Add(small, one)
    lost = op.Div(op.Sub(small, op.Sub(whole, one)), whole)
    log = op.Add(op.Log(whole), lost)
    return typed(op.Add(op.Relu(x), log if beta == 1 else op.Div(log, _like(float(beta), x))))


def prelu(x: ir.Value, weight: ir.Value) -> ir.Value:
    """X + (slope - 1) min(x, 0), with slopes along the second axis."""
    assert x.shape is not None
    assert weight.shape is not None
    slope = op.Sub(weight, _like(1.0, weight))
    if len(x.shape) > 2 and weight.shape[0] != 1:
        slope = op.Reshape(slope, op.Constant(value_ints=[-1, *[1] * (len(x.shape) - 2)]))
    return typed(op.Add(x, op.Mul(op.Min(x, _like(0.0, x)), slope)))


def _like(number: float, x: ir.Value) -> Any:
    return op.CastLike(op.Constant(value_float=number), x)

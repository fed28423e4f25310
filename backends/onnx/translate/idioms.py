"""ONNX for the composite operators of `graph/idioms`, in the forms that ONNX Runtime fuses."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript import opset21

from pt2e_quant.backends.onnx.translate.marks import mark
from pt2e_quant.backends.onnx.values import MICROSOFT
from pt2e_quant.graph.idioms.masks import AdditiveMask, AnySeen
from pt2e_quant.graph.idioms.rms_norm import RmsNorm
from pt2e_quant.graph.idioms.rotary_embedding import RotaryEmbedding
from pt2e_quant.graph.idioms.shared_heads import RegroupHeads

op: Any = opset21
"""onnxscript's operators; each call adds a node to the model being written."""

_rotary = mark("RotaryEmbedding", ("x", "start", "cos", "sin"), ("y",), domain=MICROSOFT)


def idiom_translations() -> dict[Any, Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    return {
        RmsNorm: rms_norm,
        AdditiveMask: additive_mask,
        AnySeen: any_seen,
        RotaryEmbedding: rotary_embedding,
        RegroupHeads: regroup_heads,
    }


def rms_norm(x: ir.Value, dims: Sequence[int], eps: float) -> ir.Value:
    """Divide by the root: x / Sqrt(ReduceMean(Pow(x, 2)) + eps).

    ONNX Runtime makes one SimplifiedLayerNormalization of it and a product behind it, but not of
    a product with a reciprocal. One rounding where there were two: a value moves by one and a half
    units in its last place at most.
    """
    squares = op.Pow(x, _constant(2.0, x))
    mean = op.ReduceMean(squares, op.Constant(value_ints=list(dims)), keepdims=1)
    found: ir.Value = op.Div(x, op.Sqrt(op.Add(mean, _constant(eps, x))))
    return found


def additive_mask(seen: ir.Value, low: float, dtype: ir.DataType) -> ir.Value:
    """A choice of two numbers."""
    numbers = (ir.tensor(np.array(value, dtype.numpy())) for value in (0.0, low))
    found: ir.Value = op.Where(seen, *(op.Constant(value=number) for number in numbers))
    return found


def any_seen(seen: ir.Value, dim: int, keepdim: bool, dtype: ir.DataType) -> ir.Value:
    """The greatest of zeros and ones in the type that is wanted."""
    found: ir.Value = op.ReduceMax(
        op.Cast(seen, to=dtype), op.Constant(value_ints=[dim]), keepdims=int(keepdim)
    )
    return found


def rotary_embedding(x: ir.Value, cos: ir.Value, sin: ir.Value) -> ir.Value:
    """ONNX Runtime's own kernel, which may round a product and a sum once in place of twice."""
    found: ir.Value = _rotary(x, op.Constant(value_ints=[0]), cos, sin)
    return found


def regroup_heads(x: ir.Value, heads: int) -> ir.Value:
    """[B, H, T, D] as [B, heads, H * T / heads, D]: a view, whatever the sizes are."""
    found: ir.Value = op.Reshape(x, op.Constant(value_ints=[0, heads, -1, 0]))
    return found


def _constant(value: float, like: ir.Value) -> ir.Value:
    assert like.dtype is not None
    made: ir.Value = op.Constant(value=ir.tensor(np.array(value, like.dtype.numpy())))
    return made

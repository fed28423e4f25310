"""Quantize and dequantize per token: exported as marks, written out in standard operators.

`rewrites/integer_products.py` makes integer products of the marks that a linear reads; what is
left of them is written out here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from pt2e_quant.backends.onnx.translate.marks import MARKS, mark
from pt2e_quant.backends.onnx.values import call, make_constant, redirect

CHOOSE, QUANTIZE, DEQUANTIZE = "ChoosePerToken", "QuantizePerToken", "DequantizePerToken"

_choose = mark(CHOOSE, ("x",), ("scales", "zero_points"))
_quantize = mark(QUANTIZE, ("x", "scales", "zero_points"), ("x_q",))
_dequantize = mark(DEQUANTIZE, ("x_q", "scales", "zero_points"), ("x",))


def per_token_translations() -> dict[Any, Any]:
    """Operator overload to translation."""
    decomposed = torch.ops.quantized_decomposed
    return {
        decomposed.choose_qparams_per_token_asymmetric.default: choose_per_token,
        decomposed.quantize_per_token.default: quantize_per_token,
        decomposed.dequantize_per_token.default: dequantize_per_token,
    }


def choose_per_token(x: ir.Value, dtype: ir.DataType) -> tuple[ir.Value, ir.Value]:
    """Scale and zero point of each row of int8, as double and int64 [..., 1]."""
    scale, zero_point = _choose(x)
    return scale, zero_point


def quantize_per_token(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
) -> Any:
    """int8[..., K] of float[..., K]."""
    return _quantize(x, scales, zero_points)


def dequantize_per_token(
    x: ir.Value,
    scales: ir.Value,
    zero_points: ir.Value,
    quant_min: int,
    quant_max: int,
    dtype: ir.DataType,
    output_dtype: ir.DataType = ir.DataType.FLOAT,
) -> Any:
    """float[..., K] of int8[..., K]."""
    return _dequantize(x, scales, zero_points)


_EPS = float(np.finfo(np.float32).eps)
"""The least scale, as torch's `choose_qparams_per_token_asymmetric` has it."""


def read_per_token(value: ir.Value | None) -> ir.Value | None:
    """The real tensor whose rows a value has rounded to int8, None if it is no such."""
    dequantize = value.producer() if value is not None else None
    if dequantize is None or dequantize.domain != MARKS:
        return None
    quantize = dequantize.inputs[0].producer() if dequantize.inputs[0] is not None else None
    if dequantize.op_type != DEQUANTIZE or quantize is None or quantize.op_type != QUANTIZE:
        return None
    return quantize.inputs[0]


def expand_per_token(graph: ir.Graph) -> int:
    """Write out what is left of q/dq per token.

    Before:  DequantizePerToken(QuantizePerToken(x))
    After:   (Clip(Round(x / s) + z, 0, 255) - z) * s, with s and z of each row of x
    """
    changed = 0
    for node in list(graph):
        if node.domain != MARKS or node.op_type != DEQUANTIZE:
            continue
        x, output = read_per_token(node.outputs[0]), node.outputs[0]
        assert x is not None  # canonical form: a dequantize per token reads a quantize
        rows = choose_rows(graph, node, x, output.name or "x", keepdims=True)
        scale, zero_point = rows.scale, rows.zero_point
        base = f"{output.name}_rounded"
        limits = [make_constant(graph, f"{base}_limit", np.array(v, np.float32)) for v in (0, 255)]
        steps = call(node, "Div", [x, scale], name=f"{base}_div", like=output)
        steps = call(node, "Round", [steps], name=f"{base}_round", like=output)
        steps = call(node, "Add", [steps, zero_point], name=f"{base}_add", like=output)
        steps = call(node, "Clip", [steps, *limits], name=f"{base}_clip", like=output)
        steps = call(node, "Sub", [steps, zero_point], name=f"{base}_sub", like=output)
        redirect(output, call(node, "Mul", [steps, scale], name=base, like=output))
        changed += 1
    return changed + remove_marks(graph)


def remove_marks(graph: ir.Graph) -> int:
    """Take out the marks that nothing reads any more; how many."""
    changed = 0
    for node in reversed(list(graph)):
        if node.domain == MARKS and not any(v.uses() for v in node.outputs):
            assert node.op_type in (CHOOSE, QUANTIZE, DEQUANTIZE)
            graph.remove(node, safe=True)
            changed += 1
    return changed


@dataclass(frozen=True, slots=True)
class RowQparams:
    """Qparams of uint8 for each row of a tensor, float32.

    Args:
        scale: of each row.
        negated: -scale.
        zero_point: 0 to 255, whole.
    """

    scale: ir.Value
    negated: ir.Value
    zero_point: ir.Value


def choose_rows(
    graph: ir.Graph, at: ir.Node, x: ir.Value, base: str, *, keepdims: bool
) -> RowQparams:
    """The qparams of x[..., K]: [..., 1], or [...] without `keepdims`.

    scale = (max - min) / 255 with 0 in the range, zero_point = Round(min / -scale). The greatest is
    never taken for less than 255 eps, which keeps every scale from 0 in no operator of its own.
    """
    last = make_constant(graph, f"{base}_axis", np.array([-1]))
    zero = make_constant(graph, f"{base}_zero", np.array(0, np.float32))
    least = make_constant(graph, f"{base}_least_top", np.array(255 * _EPS, np.float32))
    step = make_constant(graph, f"{base}_step", np.array(1 / 255, np.float32))
    keep = {"keepdims": int(keepdims)}

    def make(op_type: str, *inputs: ir.Value, of: str) -> ir.Value:
        reduces = op_type.startswith("Reduce")
        made = call(at, op_type, inputs, keep if reduces else None, name=f"{base}_{of}")
        made.type = ir.TensorType(ir.DataType.FLOAT)
        return made

    top = make("Max", make("ReduceMax", x, last, of="greatest"), least, of="top")
    low = make("Min", make("ReduceMin", x, last, of="least"), zero, of="low")
    negated = make("Mul", make("Sub", low, top, of="width"), step, of="negated")
    scale = make("Neg", negated, of="scale")
    zero_point = make("Round", make("Div", low, negated, of="offset"), of="zero_point")
    return RowQparams(scale, negated, zero_point)

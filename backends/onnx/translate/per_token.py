"""Marks for q/dq per token, which ONNX has no operators for; a rewrite takes every one out.

`rewrites/integer_products.py` makes integer products of those that a linear reads, and
`rewrites/expand_per_token.py` writes out the rest.
"""

from typing import Any

import onnx_ir as ir
import torch

from pt2e_quant.backends.onnx.translate.marks import mark

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

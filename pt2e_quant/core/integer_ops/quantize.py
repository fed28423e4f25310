"""quantize, dequantize and the choice of scales for rows, written out in ATen operators.

quantize and dequantize are equal to the last bit to `quantized_decomposed`'s, whose order of
roundings they keep; a target may divide by the scale instead.
"""

from typing import Any, NamedTuple

import torch

from pt2e_quant.core.integer_ops.calls import Call, Value, cast
from pt2e_quant.core.integer_ops.profiles import Quantization, RowQuantization
from pt2e_quant.core.qdq import QdqKind

WRITTEN_KINDS = (QdqKind.PER_TENSOR, QdqKind.PER_TENSOR_DYNAMIC, QdqKind.PER_CHANNEL)
"""The layouts whose q/dq are written out; others keep their operators."""

_aten: Any = torch.ops.aten
_LOW, _HIGH = -128.0, 127.0
_EPS = float(torch.finfo(torch.float32).eps)


def quantize(
    call: Call[Value],
    x: Value,
    scale: float | Value,
    zero_point: float | Value,
    *,
    limits: tuple[int, int],
    storage: torch.dtype,
    by: Quantization = Quantization.INVERSE,
) -> Value:
    """clamp(round(x * scale) + zero_point) as integers, or x / scale; ties to even.

    Args:
        call: how to compute.
        x: float32.
        scale: float32 that broadcasts against x, or one number; its inverse to multiply by.
        zero_point: likewise.
        limits: quant_min and quant_max.
        storage: dtype of the result.
        by: whether it multiplies by the inverse or divides.
    """
    scaled = _aten.mul.Tensor if by is Quantization.INVERSE else _aten.div.Tensor
    steps = call(_aten.round_.default, call(scaled, x, scale))
    moved = call(_aten.add_.Tensor, steps, zero_point)
    return cast(call, call(_aten.clamp_.default, moved, *limits), storage)


def dequantize(
    call: Call[Value],
    q: Value,
    scale: float | Value,
    zero_point: float | Value,
    *,
    dtype: torch.dtype = torch.float32,
) -> Value:
    """(q - zero_point) * scale in dtype.

    Args:
        call: how to compute.
        q: integers.
        scale: float32 that broadcasts against q, or one number.
        zero_point: likewise.
        dtype: of the result.
    """
    steps = call(_aten.sub_.Tensor, cast(call, q, dtype), zero_point)
    return call(_aten.mul_.Tensor, steps, scale)


class RowQparams(NamedTuple):
    """Qparams of rows: float32 [..., 1].

    Attributes:
        scale: real units in one step.
        factor: what quantize multiplies by, or divides by where the target divides.
        zero_point: -128 to 127, whole.
    """

    scale: Any
    factor: Any
    zero_point: Any


def choose_rows(call: Call[Value], x: Value, by: RowQuantization) -> RowQparams:
    """The qparams of int8 for each row of float32 [..., K].

    Args:
        call: how to compute.
        x: finite values.
        by: INVERSE_OF_INVERSE, or DIVIDED.
    """
    least = call(_aten.clamp.default, call(_aten.amin.default, x, [-1], True), None, 0.0)
    greatest = call(_aten.clamp.default, call(_aten.amax.default, x, [-1], True), 0.0)
    if by is RowQuantization.DIVIDED:
        return _divided(call, least, greatest)
    return _inverse_of_inverse(call, least, greatest)


def choose_one_row(call: Call[Value], x: Value) -> RowQparams:
    """The qparams of int8 for the only row of float32 x, as ONNX Runtime's DynamicQuantizeLinear.

    onnxruntime/core/util/qmath.h (GetQuantizationParameter): (max - min) / 255, 1 for zeros alone.
    """
    least = call(_aten.clamp.default, call(_aten.amin.default, x, [-1], True), None, 0.0)
    greatest = call(_aten.clamp.default, call(_aten.amax.default, x, [-1], True), 0.0)
    width = call(_aten.sub.Tensor, greatest, least)
    whole = call(_aten.where.ScalarOther, call(_aten.ne.Scalar, width, 0.0), width, 255.0)
    scale = call(_aten.div.Tensor, whole, call(_aten.full_like.default, whole, 255.0))
    negated = call(_aten.neg.default, call(_aten.div.Tensor, least, scale))
    zero_point = call(_aten.add.Tensor, call(_aten.round.default, negated), _LOW)
    return RowQparams(scale, scale, zero_point)


def _divided(call: Call[Value], least: Value, greatest: Value) -> RowQparams:
    """backends/onnx/rewrites/expand_per_token.py, whose uint8 are int8 here."""
    top = call(_aten.clamp.default, greatest, 255 * _EPS)
    width = call(_aten.sub.Tensor, least, top)
    negated = call(_aten.mul.Tensor, width, float(torch.tensor(1 / 255)))
    offset = call(_aten.round.default, call(_aten.div.Tensor, least, negated))
    scale = call(_aten.neg.default, negated)
    return RowQparams(scale, scale, call(_aten.add.Tensor, offset, _LOW))


def _inverse_of_inverse(call: Call[Value], least: Value, greatest: Value) -> RowQparams:
    """XNNPACK src/xnnpack/quantization.h; a row of zeros has the scale 1."""
    width = call(_aten.sub.Tensor, greatest, least)
    whole = call(_aten.where.ScalarOther, call(_aten.ne.Scalar, width, 0.0), width, 255.0)
    inverse = call(_aten.div.Tensor, call(_aten.full_like.default, whole, 255.0), whole)
    low = call(_aten.mul.Tensor, least, inverse)
    high = call(_aten.mul.Tensor, greatest, inverse)
    from_least = call(_aten.rsub.Scalar, low, _LOW)
    from_greatest = call(_aten.rsub.Scalar, high, _HIGH)
    errors = call(
        _aten.add.Tensor,
        call(_aten.add.Tensor, low, _LOW),
        call(_aten.add.Tensor, high, _HIGH),
    )
    is_least = call(_aten.gt.Scalar, errors, 0.0)
    chosen = call(_aten.where.self, is_least, from_least, from_greatest)
    zero_point = call(_aten.round.default, call(_aten.clamp.default, chosen, _LOW, _HIGH))
    scale = call(_aten.reciprocal.default, inverse)
    return RowQparams(scale, call(_aten.reciprocal.default, scale), zero_point)

"""Scales of run time for rows of float values, as runtimes choose them."""

from typing import Any, NamedTuple

import torch

from pt2e_quant.core.integer_ops.calls import Call, Value
from pt2e_quant.core.integer_ops.profiles import RowQuantization

_aten: Any = torch.ops.aten

_LOW, _HIGH = -128.0, 127.0
_EPS = float(torch.finfo(torch.float32).eps)


class RowQparams(NamedTuple):
    """What a row is quantized by: float32 [..., 1].

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

"""quantize and dequantize, written out in the operators they are made of.

Equal to the last bit to `quantized_decomposed`'s, whose order of roundings they keep; a target may
divide by the scale instead.
"""

from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import Call, Value, cast
from pt2e_quant.core.integer_ops.profiles import Quantization
from pt2e_quant.core.qdq import QdqKind

WRITTEN_KINDS = (QdqKind.PER_TENSOR, QdqKind.PER_TENSOR_DYNAMIC, QdqKind.PER_CHANNEL)
"""The layouts whose q/dq are written out; others keep their operators."""

_aten: Any = torch.ops.aten


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

"""Accumulators to integers of the output's scale."""

from dataclasses import dataclass
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import Call, Value, cast
from pt2e_quant.core.qparams import QParams

__all__ = ["OutputRange", "output_range", "requantize"]

_aten: Any = torch.ops.aten
_EXACT = 1 << 24
"""Up to here every integer is a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRange:
    """Where the integers of an output lie.

    Args:
        zero_point: stands for 0.0.
        low: least integer; above quant_min where a relu ends the operator.
        high: greatest integer.
        storage: dtype of the result.
    """

    zero_point: int
    low: int
    high: int
    storage: torch.dtype

    @property
    def is_exact(self) -> bool:
        """Whether the limits, less the zero_point, are float32 numbers."""
        return max(abs(self.low - self.zero_point), abs(self.high - self.zero_point)) <= _EXACT


def output_range(
    qp: QParams, storage: torch.dtype, bounds: tuple[float | None, float | None] = (None, None)
) -> OutputRange:
    """The range of an output, narrowed to real bounds (relu6 is (0, 6)).

    quantize is monotone, so that clamping the integers is clamping the real values before it.
    """
    low, high = (_quantized(b, qp) for b in bounds)
    return OutputRange(
        zero_point=qp.zero_point_int,
        low=qp.quant_min if low is None else low,
        high=qp.quant_max if high is None else high,
        storage=storage,
    )


def _quantized(real: float | None, qp: QParams) -> int | None:
    if real is None:
        return None
    value = torch.tensor(float(real)) * (1.0 / qp.scale_float)
    step = float(torch.round(value).clamp(-_EXACT * 64.0, _EXACT * 64.0)) + qp.zero_point_int
    return int(min(max(step, qp.quant_min), qp.quant_max))


def requantize(
    call: Call[Value], accumulator: Value, factor: float | Value, out: OutputRange
) -> Value:
    """Integers of the output's scale: clamp(round(accumulator * factor) + zero_point, low, high).

    The accumulator is rounded to float32, the product is rounded to float32, the result to the
    nearest integer with ties to even, as XNNPACK and ONNX Runtime do. They saturate after adding
    the zero_point; clamping before is the same.

    Args:
        call: how to compute.
        accumulator: int32.
        factor: float32 that broadcasts against it, (input scale * weight scale) / output scale.
        out: must be exact.
    """
    product = call(_aten.mul.Tensor, cast(call, accumulator, torch.float32), factor)
    rounded = call(_aten.round.default, product)
    low, high = out.low - out.zero_point, out.high - out.zero_point
    steps = cast(call, call(_aten.clamp.default, rounded, low, high), torch.int32)
    if out.zero_point:
        steps = call(_aten.add.Tensor, steps, out.zero_point)
    return cast(call, steps, out.storage)

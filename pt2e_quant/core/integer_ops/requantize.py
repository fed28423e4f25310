"""Accumulators to integers of the output's scale."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic

import torch
from torch import Tensor

from pt2e_quant.core.integer import Multiplier, multiplier_of, requantize_fixed
from pt2e_quant.core.integer_ops.calls import Call, Value, cast
from pt2e_quant.core.integer_ops.define import define_integer_op
from pt2e_quant.core.integer_ops.profiles import Requantization
from pt2e_quant.core.qparams import QParams

_aten: Any = torch.ops.aten
_EXACT = 1 << 24
"""Up to here every integer is a float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputRange:
    """The zero point and limits of an output's integers.

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
        """True if the limits, with and less the zero_point, are float32 numbers."""
        limits = (self.low, self.high, self.low - self.zero_point, self.high - self.zero_point)
        return max(map(abs, limits)) <= _EXACT


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


def byte_offset(storage: torch.dtype) -> int:
    """The offset from an integer to uint8, as ONNX files store int8 activations for x86."""
    return 128 if storage is torch.int8 else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor(Generic[Value]):
    """The factor from accumulator steps to output steps.

    Attributes:
        kind: how it is applied.
        values: one float32 factor; two that follow each other; or multiplier and shift (int64).
            Each is a number, or broadcasts against the accumulator.
    """

    kind: Requantization
    values: tuple[Any, ...]

    def held(self, hold: Callable[[Tensor, str], Any]) -> "Factor[Any]":
        """The factor with its tensors held as values; a single float factor stays a number."""
        names = ("multiplier", "shift") if self.kind.is_fixed else ("factor", "inverse")
        # Of no dimensions, so that a sum over all dimensions keeps none.
        alone = (v.reshape(()) if v.numel() == 1 else v for v in self.values)
        values = (
            value.item() if value.dim() == 0 and not self.kind.is_fixed else hold(value, name)
            for value, name in zip(alone, names, strict=False)
        )
        return Factor(kind=self.kind, values=tuple(values))


def factor_of(
    kind: Requantization,
    scales: Sequence[Tensor],
    output_scale: Tensor,
    divisor: int | Tensor = 1,
    *,
    bits: int = 31,
) -> Factor[Tensor]:
    """The factor scales[0] * scales[1] * … / (output_scale * divisor).

    Those of one float32 factor round each product and the quotient in that order, as XNNPACK
    (src/operators/convolution-nhwc.c) and ONNX Runtime (QLinearConv, QLinearMatMul) do. The kinds
    of two factors keep the product and the inverse of the output scale apart, as oneDNN does. The
    fixed ones take the quotient in float64, as TFLite does (PopulateConvolutionQuantizationParams),
    by a multiplier of so many bits.
    """
    if kind.is_fixed:
        real = _product([s.double() for s in scales]) / (output_scale.double() * divisor)
        found = multiplier_of(real, bits)
        return Factor(kind=kind, values=(found.value, found.shift))
    product = _product(scales)
    if kind.has_two_factors:
        return Factor(kind=kind, values=(product, 1.0 / (output_scale * divisor)))
    return Factor(kind=kind, values=(product / (output_scale * divisor),))


def _product(factors: Sequence[Tensor]) -> Tensor:
    """The product, from left to right."""
    return reduce(torch.mul, factors)


def requantize(
    call: Call[Value],
    accumulator: Value,
    factor: Factor[Any],
    out: OutputRange,
    *,
    bias: Value | None = None,
) -> Value:
    """Integers of the output's scale: clamp(rounded(accumulator * factor) + zero_point, low, high).

    In float, the accumulator is rounded to float32, each product is rounded to float32, the result
    to the nearest integer with ties to even. Runtimes saturate after adding the zero_point;
    clamping before is the same.

    Args:
        call: how to compute.
        accumulator: int32, or int64.
        factor: by which.
        out: must be exact.
        bias: float32 that broadcasts against the accumulator, added between two factors.
    """
    if factor.kind.is_fixed:
        limits = out.zero_point, out.low, out.high
        return call(Rescale, accumulator, *factor.values, *limits, out.storage, str(factor.kind))
    product = cast(call, accumulator, torch.float32)
    for number, value in enumerate(factor.values):
        product = call(_aten.mul_.Tensor, product, value)
        if number == 0 and bias is not None:
            product = call(_aten.add_.Tensor, product, bias)
    if factor.kind.rounds_with_zero:
        is_byte = factor.kind is Requantization.FLOAT32_WITH_ZERO
        offset = byte_offset(out.storage) if is_byte else 0
        if out.zero_point + offset:
            product = call(_aten.add_.Tensor, product, float(out.zero_point + offset))
        rounded = call(_aten.round_.default, product)
        if offset:
            rounded = call(_aten.sub_.Tensor, rounded, offset)
        return cast(call, call(_aten.clamp_.default, rounded, out.low, out.high), out.storage)
    rounded = call(_aten.round_.default, product)
    low, high = out.low - out.zero_point, out.high - out.zero_point
    # Exact: float32 holds the limits with and without the zero_point.
    steps = call(_aten.clamp_.default, rounded, low, high)
    if out.zero_point:
        steps = call(_aten.add_.Tensor, steps, out.zero_point)
    return cast(call, steps, out.storage)


def _rescale(
    total: Tensor,
    multiplier: Tensor,
    shift: Tensor,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    kind: str,
) -> Tensor:
    """`core.integer.requantize_fixed` as an operator of a graph."""
    made = requantize_fixed(
        total,
        Multiplier(value=multiplier, shift=shift),
        zero_point=zero_point,
        quant_min=low,
        quant_max=high,
        kind=Requantization(kind),
    )
    return made.to(dtype)


def _fake_rescale(total: Tensor, multiplier: Tensor, *rest: Any) -> Tensor:
    return (total * multiplier).to(rest[4])


Rescale = define_integer_op(
    "integer_rescale(Tensor total, Tensor multiplier, Tensor shift, int zero_point, int low, "
    "int high, ScalarType dtype, str kind) -> Tensor",
    _rescale,
    _fake_rescale,
)
"""Multiplier and shift, by tensors."""

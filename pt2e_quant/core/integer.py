"""Exact integer arithmetic: rounding, saturation, requantization, zero-point correction.

What a backend computes in integers is defined in these terms, so a result here is what a kernel
must give to the last bit. int32 accumulators are widened to int64, where nothing overflows.
What a target does with an accumulator is in `core.integer_ops.requantize`.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.integer_ops.profiles import Requantization

_MULTIPLIER_BITS = 31
_MAX_SHIFT = 62


class Rounding(StrEnum):
    """Rounding of a number between two integers."""

    FLOOR = "floor"
    """To the lower integer."""
    HALF_UP = "half_up"
    """To the nearest, ties to the upper integer (TOSA's and CMSIS-NN's single rounding)."""
    HALF_AWAY = "half_away"
    """To the nearest, ties away from zero (QNNPACK, C's round)."""
    HALF_EVEN = "half_even"
    """To the nearest, ties to even (IEEE 754, torch.round)."""


def saturate(x: Tensor, quant_min: int, quant_max: int) -> Tensor:
    """The nearest integer within [quant_min, quant_max]."""
    return x.clamp(quant_min, quant_max)


def shift_right(x: Tensor, shift: int | Tensor, rounding: Rounding) -> Tensor:
    """Divide by 2**shift and round; exact for every int64.

    Args:
        x: int64.
        shift: 0 .. 62, broadcast against x.
        rounding: where the quotient goes.

    Returns:
        int64, shaped like x.
    """
    amount = torch.as_tensor(shift, dtype=torch.int64, device=x.device)
    floor = x >> amount
    if rounding is Rounding.FLOOR:
        return floor
    rest = x - (floor << amount)
    # Twice the rest against the divisor: no half of 1, and both fit in 63 bits.
    twice, divisor = rest * 2, torch.ones_like(amount) << amount
    match rounding:
        case Rounding.HALF_UP:
            tie_goes_up = torch.ones_like(x, dtype=torch.bool)
        case Rounding.HALF_AWAY:
            tie_goes_up = x >= 0
        case _:
            tie_goes_up = (floor & 1) == 1
    return floor + ((twice > divisor) | ((twice == divisor) & tie_goes_up)).to(torch.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Multiplier:
    """Positive real factors as value * 2**-shift.

    Attributes:
        value: int64, 2**30 .. 2**31 - 1, or 0 for a factor that takes no int32 to one half.
        shift: int64, 0 .. 62, shaped like value.
    """

    value: Tensor
    shift: Tensor


def multiplier_of(factors: Tensor, bits: int = _MULTIPLIER_BITS) -> Multiplier:
    """The nearest multiplier and shift of each factor; ties go up.

    Args:
        factors: floats of any shape, at least 0 and below 2**31.
        bits: how many the multiplier has, 1 .. 31; the others of its 31 are 0.

    Raises:
        ConfigError: if a factor is out of that range.
    """
    real = factors.to(torch.float64)
    if not bool(((real >= 0) & (real < float(1 << _MULTIPLIER_BITS))).all()):
        raise ConfigError("a requantization factor must be at least 0 and below 2**31")
    fraction, exponent = torch.frexp(real)
    value = torch.floor(fraction * float(1 << bits) + 0.5).to(torch.int64)
    value = value << (_MULTIPLIER_BITS - bits)
    overflows = value == 1 << _MULTIPLIER_BITS
    value = torch.where(overflows, value >> 1, value)
    shift = _MULTIPLIER_BITS - (exponent.to(torch.int64) + overflows)
    # An int32 times 2**31 shifted right by more than 62 is under one half.
    vanishes = (shift > _MAX_SHIFT) | (value == 0)
    return Multiplier(value=torch.where(vanishes, 0, value), shift=torch.where(vanishes, 0, shift))


def requantize_fixed(
    accumulator: Tensor,
    multiplier: Multiplier,
    *,
    zero_point: int,
    quant_min: int,
    quant_max: int,
    kind: Requantization = Requantization.SINGLE,
) -> Tensor:
    """Integers of the output scale by multiplier and shift, as NPUs do: no float.

    - SINGLE: TOSA's apply_scale_32 with single rounding; TensorFlow Lite's
      MultiplyByQuantizedMultiplier (kernels/internal/common.cc) built with TFLITE_SINGLE_ROUNDING;
      ruy's (ruy/apply_multiplier.cc).
    - TOSA_DOUBLE: TOSA's apply_scale_32 with double rounding.
    - GEMMLOWP: TensorFlow Lite's MultiplyByQuantizedMultiplier otherwise. gemmlowp
      (fixedpoint/fixedpoint.h) rounds the high half of the doubled product with ties up
      (SaturatingRoundingDoublingHighMul: the nudge of a negative product is 1 - 2**30, and C
      divides towards zero) and the shift that is left with ties away from zero
      (RoundingDivideByPOT). A left shift that leaves int32 saturates here; there it wraps, which
      no scale of a network reaches.

    Args:
        accumulator: integers within int32.
        multiplier: factors that broadcast against it.
        zero_point: of the output.
        quant_min: least output.
        quant_max: greatest output.
        kind: where the results are rounded.

    Returns:
        int64, shaped like accumulator.
    """
    total, value, shift = accumulator.to(torch.int64), multiplier.value, multiplier.shift
    match kind:
        case Requantization.SINGLE:
            scaled = shift_right(total * value, shift, Rounding.HALF_UP)
        case Requantization.TOSA_DOUBLE:
            nudge = torch.where(total >= 0, 1 << 30, -(1 << 30)) * (shift > 31)
            scaled = shift_right(total * value + nudge, shift, Rounding.HALF_UP)
        case Requantization.GEMMLOWP:
            left = (_MULTIPLIER_BITS - shift).clamp(min=0)
            right = (shift - _MULTIPLIER_BITS).clamp(min=0)
            shifted = saturate(total << left, -(1 << 31), (1 << 31) - 1)
            high = shift_right(shifted * value, _MULTIPLIER_BITS, Rounding.HALF_UP)
            scaled = shift_right(high, right, Rounding.HALF_AWAY)
        case _:
            raise ConfigError(f'"{kind}" multiplies in float, not by multiplier and shift')
    return saturate(scaled + zero_point, quant_min, quant_max)


def longest_inner_axis(input_reach: int, weight_reach: int) -> int:
    """Return the number of products that an int32 accumulator holds for certain.

    Args:
        input_reach: the greatest abs(x - x_zero).
        weight_reach: the greatest abs(w - w_zero).

    >>> longest_inner_axis(255, 127)  # uint8 by symmetric int8
    66311
    """
    return ((1 << 31) - 1) // max(1, input_reach * weight_reach)

"""Norms in integers: those of I-BERT (Kim et al., 2021, arXiv:2101.01321), with an exact root."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pt2e_quant.core.integer import Rounding, shift_right
from pt2e_quant.core.integer_ops.define import define_integer_op, like_input

_SUM_BITS = 61


def square_root(x: Tensor) -> Tensor:
    """floor(sqrt(x)), exact for every int64 of at least 0 (what I-BERT's Algorithm 4 ends in)."""
    root = x.double().sqrt().long().clamp(max=3037000499)
    root = root - (root * root > x).long()
    return root + ((root + 1).clamp(max=3037000499) ** 2 <= x).long() * (root < 3037000499)


Root = define_integer_op(
    "integer_root(Tensor x) -> Tensor", square_root, lambda x: torch.empty_like(x)
)
"""floor(sqrt(x)) of int64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NormFactors:
    """The integers of one layer norm or RMS norm.

    Attributes:
        centred_shift: by which the centred integers are shifted left (right if negative).
        epsilon: what is added to the sum of their squares.
        root_shift: by which that sum is shifted before the root: 2 * root_shift bits.
        fraction: bits below an output step of gain and offset.
        gain: int64; the weight * sqrt(n) / output scale.
        offset: int64; the bias / output scale.
    """

    centred_shift: int
    epsilon: int
    root_shift: int
    fraction: int
    gain: Tensor
    offset: Tensor


_CENTRED_BITS = 22


def norm_factors(
    weight: Tensor,
    bias: Tensor,
    *,
    count: int,
    reach: int,
    input_scale: float,
    output_scale: float,
    eps: float,
    is_centred: bool,
) -> NormFactors | None:
    """The factors for int64 arithmetic, None if its range is too small for them.

    Args:
        weight: float64, shaped to broadcast against the input.
        bias: likewise.
        count: how many values are normalised together, n.
        reach: the greatest abs(x - zero_point).
        input_scale: of x.
        output_scale: of the result.
        eps: of the norm, in real units.
        is_centred: whether the mean is taken off.
    """
    unit = count if is_centred else 1
    centred_shift = _CENTRED_BITS - math.ceil(math.log2(2 * reach * unit + 1))
    epsilon = eps * unit**2 * count / input_scale**2 * 2.0 ** (2 * centred_shift)
    most = count * 2.0 ** (2 * _CENTRED_BITS) + epsilon
    root_shift = (_SUM_BITS - math.ceil(math.log2(most))) // 2
    gain, offset = (v.double() / output_scale for v in (weight * math.sqrt(count), bias))
    gain_bits = _SUM_BITS - _CENTRED_BITS - root_shift - 1
    greatest = max(float(gain.abs().max()), 2.0**-60)
    fraction = min(gain_bits - math.ceil(math.log2(greatest)), 30)
    if root_shift < 0 or fraction < 1 or float(offset.abs().max()) * 2.0**fraction > 2.0**60:
        return None
    scaled = ((v * 2.0**fraction).round().to(torch.int64) for v in (gain, offset))
    return NormFactors(
        centred_shift=centred_shift,
        epsilon=max(round(epsilon), 1),
        root_shift=root_shift,
        fraction=fraction,
        gain=next(scaled),
        offset=next(scaled),
    )


def _norm(
    x: Tensor,
    gain: Tensor,
    offset: Tensor,
    dims: Sequence[int],
    input_zero_point: int | None,
    shifts: Sequence[int],
    epsilon: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    centred_shift, root_shift, fraction = shifts
    axes = list(dims)
    wide = x.long()
    if input_zero_point is None:
        count = math.prod(x.shape[d] for d in axes)
        centred = wide * count - wide.sum(axes, keepdim=True)
    else:
        centred = wide - input_zero_point
    if centred_shift >= 0:
        centred = centred << centred_shift
    else:
        centred = shift_right(centred, -centred_shift, Rounding.HALF_UP)
    squares = (centred * centred).sum(axes, keepdim=True) + epsilon
    root = square_root(squares << (2 * root_shift))
    scaled = torch.div((centred << root_shift) * gain + (root >> 1), root, rounding_mode="floor")
    steps = shift_right(scaled + offset, fraction, Rounding.HALF_UP)
    return (steps + zero_point).clamp(low, high).to(dtype)


Norm = define_integer_op(
    "integer_norm(Tensor x, Tensor gain, Tensor offset, int[] dims, int? input_zero_point, "
    "int[] shifts, int epsilon, int zero_point, int low, int high, ScalarType dtype) -> Tensor",
    _norm,
    like_input,
)
"""(x - mean) / sqrt(var + eps) * weight + bias; without the mean where a zero_point is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineFactors:
    """A factor and an offset for each channel.

    Attributes:
        fraction: bits below an output step.
        gain: int64; output steps for an input step.
        offset: int64; output steps.
    """

    fraction: int
    gain: Tensor
    offset: Tensor


_AFFINE_BITS = 30
_LEAST_AFFINE_BITS = 16
"""With fewer a factor's rounding would be seen in the steps of a long input."""


def affine_factors(
    scale: Tensor, shift: Tensor, *, reach: int, input_scale: float, output_scale: float
) -> AffineFactors | None:
    """The factors of x * scale + shift for int64 arithmetic, None if they are too large for it.

    Args:
        scale: float64, of each channel.
        shift: float64, of each channel, in real units.
        reach: the greatest abs(x - zero_point).
        input_scale: of x.
        output_scale: of the result.

    >>> factors = affine_factors(
    ...     torch.tensor([0.5]), torch.tensor([1.0]), reach=255, input_scale=0.1, output_scale=0.2
    ... )
    >>> factors.fraction, factors.gain.tolist(), factors.offset.tolist()
    (30, [268435456], [5368709120])
    """
    gain, offset = scale.double() * (input_scale / output_scale), shift.double() / output_scale
    most = float((gain.abs() * reach + offset.abs()).max()) + 1.0
    if not math.isfinite(most):
        return None
    fraction = min(_AFFINE_BITS, _SUM_BITS - math.ceil(math.log2(most)))
    if fraction < _LEAST_AFFINE_BITS:
        return None
    gain, offset = ((v * 2.0**fraction).round().to(torch.int64) for v in (gain, offset))
    return AffineFactors(fraction=fraction, gain=gain, offset=offset)


def _affine(
    x: Tensor,
    gain: Tensor,
    offset: Tensor,
    input_zero_point: int,
    fraction: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    total = (x.long() - input_zero_point) * gain + offset
    return (shift_right(total, fraction, Rounding.HALF_UP) + zero_point).clamp(low, high).to(dtype)


Affine = define_integer_op(
    "integer_affine(Tensor x, Tensor gain, Tensor offset, int input_zero_point, int fraction, "
    "int zero_point, int low, int high, ScalarType dtype) -> Tensor",
    _affine,
    like_input,
)
"""x * scale + shift of each channel, rounded once, ties up: a norm by running statistics."""

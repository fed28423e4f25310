"""Softmax and its logarithm in integers.

A softmax takes powers of two from a table with a line between neighbours, as TensorFlow Lite's of
16 bits takes exp (kernels/internal/reference/softmax.h): I-BERT's polynomial of degree 2 is 0.3 %
from exp, up to 0.6 of a step of 8 bits. Logarithms to base two are made likewise.
"""

import math

import torch
from torch import Tensor

from pt2e_quant.core.integer import Rounding, shift_right
from pt2e_quant.core.integer_ops.define import define_integer_op, like_input

_MOST_HALVINGS = 31
_SUM_BITS = 61
_FINE = 20
"""Bits below 1.0 of a power of two's argument."""
_ENTRY = 12
"""Fraction bits between two of the table's 257 entries."""
_POWERS = [round(2.0 ** (30 - i / 256)) for i in range(257)]


def integer_power(distance: Tensor) -> Tensor:
    """2**-distance in units of 2**-30: a shift, and a line between neighbours of 257 entries.

    At most (ln 2 / 256)**2 / 8 = 9.2e-7 of itself and 2**-29 from it.

    Args:
        distance: int64, at least 0, in 2**-20.
    """
    whole, rest = distance >> _FINE, distance & ((1 << _FINE) - 1)
    index, part = rest >> _ENTRY, rest & ((1 << _ENTRY) - 1)
    powers = torch.tensor(_POWERS, device=distance.device)
    below, above = powers[index], powers[index + 1]
    line = (below << _ENTRY) + (above - below) * part + (1 << (_ENTRY - 1)) >> _ENTRY
    return line >> whole.clamp(max=_MOST_HALVINGS)


def softmax_factors(input_scale: float, output_scale: float) -> tuple[int, int, int, int]:
    """Multiplier and shift of a softmax's input, then those of its output.

    Args:
        input_scale: of the scores.
        output_scale: of the result.

    >>> softmax_factors(0.5, 1 / 256)
    (1549082005, 11, 524288, 11)
    """
    fraction, exponent = math.frexp(input_scale * (1 << _FINE) / math.log(2))
    multiplier, shift = round(fraction * (1 << 31)), 31 - exponent
    out_fraction, out_exponent = math.frexp(1.0 / output_scale)
    out_bits = max(_OUT_BITS, out_exponent)
    out = round(out_fraction * (1 << out_bits)), out_bits - out_exponent
    while shift < 0:
        multiplier, shift = multiplier * 2, shift + 1
    return multiplier >> max(shift - 62, 0), min(shift, 62), *out


_OUT_BITS = 20
MOST_OUT_BITS = 31
"""An exponent of less than 31 bits, doubled, times such a multiplier fits in an int64."""


def _softmax(
    x: Tensor,
    dim: int,
    multiplier: int,
    shift: int,
    out_multiplier: int,
    out_shift: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
    seen: Tensor | None = None,
) -> Tensor:
    wide = x.long()
    if seen is not None:
        # As in float, where a row sees nothing its entries are equally low.
        is_blank = ~seen.any(dim, keepdim=True)
        seen, wide = seen | is_blank, wide.masked_fill(is_blank, 0)
        wide = wide.masked_fill(~seen, torch.iinfo(x.dtype).min)
    steps = wide.amax(dim, keepdim=True) - wide
    exps = _exponentials(steps, x.dtype, multiplier, shift)
    if seen is not None:
        exps = exps.masked_fill(~seen, 0)
    total = exps.sum(dim, keepdim=True) << out_shift
    # Twice the quotient and a half, so that the division rounds to the nearest.
    y = torch.div(2 * exps * out_multiplier + total, 2 * total, rounding_mode="floor")
    return (y + zero_point).clamp(low, high).to(dtype)


def _exponentials(steps: Tensor, dtype: torch.dtype, multiplier: int, shift: int) -> Tensor:
    """exp(-steps * scale) in units of 2**-30; of 8 bits there are no more than 256."""
    if dtype.itemsize > 1:
        return integer_power(shift_right(steps * multiplier, shift, Rounding.HALF_UP))
    every = torch.arange(256, device=steps.device)
    powers = integer_power(shift_right(every * multiplier, shift, Rounding.HALF_UP))
    return powers.index_select(0, steps.flatten()).reshape(steps.shape)


def _fake_softmax(x: Tensor, dim: int, *rest: object) -> Tensor:
    dtype, seen = rest[7], rest[8] if len(rest) > 8 else None
    assert isinstance(dtype, torch.dtype)
    assert seen is None or isinstance(seen, Tensor)
    return torch.empty_like(x if seen is None else x + seen, dtype=dtype)


Softmax = define_integer_op(
    "integer_softmax(Tensor x, int dim, int multiplier, int shift, int out_multiplier, "
    "int out_shift, int zero_point, int low, int high, ScalarType dtype, "
    "Tensor? seen=None) -> Tensor",
    _softmax,
    _fake_softmax,
)
"""Softmax of integers, of those that are seen.

From the real one it is a rounding, at most 4e-6 of it in rows of up to 1,000 scores, and 2**-29.
"""


_LOGARITHMS = [round(math.log2(1.0 + i / 256) * 2.0**30) for i in range(257)]


def integer_logarithm(total: Tensor) -> Tensor:
    """log2(total) in 2**-30: the place of the leading bit, a line between 257 entries behind it.

    At most 1 / (8 * 256**2 * ln 2) = 2.8e-6 from it.

    Args:
        total: int64, at least 1 and below 2**62.
    """
    halved, whole = total, torch.zeros_like(total)
    for bits in (32, 16, 8, 4, 2, 1):
        is_large = (halved >> bits) > 0
        halved = torch.where(is_large, halved >> bits, halved)
        whole = whole + is_large.long() * bits
    # 30 bits behind the leading one.
    rest = torch.where(
        whole > 30, total >> (whole - 30).clamp(min=0), total << (30 - whole).clamp(min=0)
    )
    rest = rest - (1 << 30)
    index, part = rest >> 22, rest & ((1 << 22) - 1)
    logarithms = torch.tensor(_LOGARITHMS, device=total.device)
    below, above = logarithms[index], logarithms[index + 1]
    return (whole << 30) + below + ((above - below) * part + (1 << 21) >> 22)


_MOST_LOGARITHM = 32
"""log2 of the exponentials' sum in longer rows than there are."""


def log_softmax_factors(
    input_scale: float, output_scale: float, reach: int
) -> tuple[int, int, int, int] | None:
    """Multiplier and shift of a log_softmax's input, then those of its output.

    Args:
        input_scale: of the scores.
        output_scale: of the result.
        reach: the greatest abs(q - zero_point) of a score.

    Returns:
        None if int64 does not hold a product, or fewer than 20 bits are left for a multiplier.

    >>> log_softmax_factors(0.5, 1 / 16, 255)
    (1549082005, 11, 1488522236, 47)
    """
    multiplier, shift, *_ = softmax_factors(input_scale, 1.0)
    most = 2 * reach * input_scale / math.log(2) + _MOST_LOGARITHM
    bits = min(31, _SUM_BITS - _FINE - math.ceil(math.log2(most)))
    fraction, exponent = math.frexp(math.log(2) / (output_scale * (1 << _FINE)))
    is_far = bits < 20 or not 0 <= bits - exponent < 62
    if is_far or multiplier * reach * 2 >= 1 << 62:
        return None
    return multiplier, shift, round(fraction * (1 << bits)), bits - exponent


def _log_softmax(
    x: Tensor,
    dim: int,
    multiplier: int,
    shift: int,
    out_multiplier: int,
    out_shift: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    wide = x.long()
    distance = (wide.amax(dim, keepdim=True) - wide) * multiplier
    distance = shift_right(distance, shift, Rounding.HALF_UP)
    total = integer_power(distance).sum(dim, keepdim=True)
    # In 2**-20, as the distance; the exponentials are in 2**-30.
    logarithm = shift_right(integer_logarithm(total) - (30 << 30), 30 - _FINE, Rounding.HALF_UP)
    steps = shift_right(-(distance + logarithm) * out_multiplier, out_shift, Rounding.HALF_UP)
    return (steps + zero_point).clamp(low, high).to(dtype)


LogSoftmax = define_integer_op(
    "integer_log_softmax(Tensor x, int dim, int multiplier, int shift, int out_multiplier, "
    "int out_shift, int zero_point, int low, int high, ScalarType dtype) -> Tensor",
    _log_softmax,
    like_input,
)
"""x - max - log(sum(exp(x - max))).

From the real one it is a rounding, and at most 1e-5 in rows of up to 1,000 scores: a line between
entries for the logarithm (1.9e-6), exponentials (4e-6) and two roundings to 2**-20. The multiplier
to the output's scale has 31 bits, of 16-bit scores at least 20.
"""

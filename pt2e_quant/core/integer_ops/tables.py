"""Functions of one integer by look-up: exact for 8 bits, interpolated for 16.

Also sigmoid, silu and tanh in float32 as ONNX Runtime computes them: quotients of polynomials.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.define import define_integer_op, like_input
from pt2e_quant.core.integer_ops.profiles import Quantization
from pt2e_quant.core.integer_ops.quantize import quantize
from pt2e_quant.core.integer_ops.requantize import OutputRange
from pt2e_quant.core.qparams import QParams, dequantize

_STEP = 1 << 7
"""Inputs between two entries of an interpolated table: 65,536 / 512."""
_FRACTION = 7
"""Bits below an output step in its entries."""
_FAR = 1 << 23
"""Entries are clamped here, far outside of every 16-bit output."""


def _look_up(x: Tensor, table: Tensor, low: int) -> Tensor:
    # By its unsigned byte; an eighth of the time of table[x.long() - low].
    index = x.contiguous().view(torch.uint8).flatten().int()
    return table.roll(low).index_select(0, index).reshape(x.shape)


def _fake_look_up(x: Tensor, table: Tensor, low: int) -> Tensor:
    return torch.empty_like(x, dtype=table.dtype)


LookUp = define_integer_op(
    "integer_table(Tensor x, Tensor table, int low) -> Tensor", _look_up, _fake_look_up
)
"""table[x - low]."""


def _interpolate(
    x: Tensor,
    table: Tensor,
    input_low: int,
    zero_point: int,
    low: int,
    high: int,
    dtype: torch.dtype,
) -> Tensor:
    place = x.long() - input_low
    index, rest = place // _STEP, place % _STEP
    below, above = table.long()[index], table.long()[index + 1]
    steps = below * _STEP + (above - below) * rest
    shift = 2 * _FRACTION
    rounded = (steps + (1 << (shift - 1))) >> shift
    return (rounded + zero_point).clamp(low, high).to(dtype)


Interpolate = define_integer_op(
    "integer_interpolate(Tensor x, Tensor table, int input_low, int zero_point, int low, int high, "
    "ScalarType dtype) -> Tensor",
    _interpolate,
    like_input,
)
"""A line between neighbours of 513 entries, as TOSA's TABLE and TFLite's LUTLookup have it."""


def _integers(qp: QParams) -> Tensor:
    limits = torch.iinfo(qp.dtype)
    return torch.arange(limits.min, limits.max + 1).to(qp.dtype)


def leaky_table(slope: float, x: QParams, y: QParams, out: OutputRange) -> Tensor:
    """A table of leaky_relu as XNNPACK computes it (src/qs8-vlrelu): (d * m + 128) >> 8, plus zero.

    m is 256 times the ratio of the scales, rounded to even, and for negative differences d 256
    times that ratio times the slope, each step in float32.
    """
    ratio = x.scale.float() / y.scale.float()
    positive = int((256.0 * ratio).round())
    negative = int((256.0 * (ratio * torch.tensor(slope))).round())
    differences = _integers(x).long() - x.zero_point_int
    steps = differences * torch.where(differences >= 0, positive, negative)
    return (((steps + 128) >> 8) + out.zero_point).clamp(out.low, out.high).to(out.storage)


def table_of(
    function: Callable[[Tensor], Tensor],
    x: QParams,
    y: QParams,
    out: OutputRange,
    by: Quantization = Quantization.INVERSE,
) -> Tensor:
    """quantize(function(dequantize(q))) for every 8-bit q: what the q/dq graph gives, exactly.

    Args:
        function: of float32.
        x: of the input.
        y: of the output.
        out: the output's integers.
        by: how the target quantizes.
    """
    real = function(dequantize(_integers(x), x)).float()
    scale = y.scale_float if by is Quantization.DIVIDED else 1.0 / y.scale_float
    limits, zero = (out.low, out.high), out.zero_point
    made: Tensor = quantize(compute, real, scale, zero, limits=limits, storage=out.storage, by=by)
    return made.clamp(*limits)  # what was not a number


def interpolated_table(function: Callable[[Tensor], Tensor], x: QParams, y: QParams) -> Tensor:
    """The 513 entries of a function of 16 bits: int32, in 1/128 of an output step.

    A NaN becomes the zero_point, an infinity the limit.

    Args:
        function: of float32.
        x: of the input.
        y: of the output.
    """
    low = torch.iinfo(x.dtype).min
    places = low + _STEP * torch.arange(513, dtype=torch.float64)
    real = function(((places - x.zero_point_int) * x.scale_float).float())
    steps = real.double() / y.scale_float * (1 << _FRACTION)
    return torch.nan_to_num(steps, nan=0.0).round().clamp(-_FAR * 128, _FAR * 128).to(torch.int32)


_LOGISTIC_TOP = (
    4.37031012579801e-11,
    1.15627324459942e-07,
    6.08574864600143e-05,
    8.51377133304701e-03,
    2.48287947061529e-01,
)
_LOGISTIC_BOTTOM = (
    6.10247389755681e-13,
    5.76102136993427e-09,
    6.29106785017040e-06,
    1.70198817374094e-03,
    1.16817656904453e-01,
    9.93151921023180e-01,
)
_TANH_TOP = (
    -2.76076847742355e-16,
    2.00018790482477e-13,
    -8.60467152213735e-11,
    5.12229709037114e-08,
    1.48572235717979e-05,
    6.37261928875436e-04,
    4.89352455891786e-03,
)
_TANH_BOTTOM = (
    1.19825839466702e-06,
    1.18534705686654e-04,
    2.26843463243900e-03,
    4.89352518554385e-03,
)


def _polynomial(square: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's scheme by fused multiply-adds; the coefficient of the highest power is first.

    The polynomials are Eigen's (generic_fast_tanh_float and its logistic twin). Products and sums
    are fused as in MLAS's x86 kernels (onnxruntime/core/mlas/lib: logistic.cpp, tanh.cpp and their
    FMA3 and AVX512F kernels); a fused one is taken in float64 here and rounded once more.
    """
    real, *rest = (torch.tensor(c, dtype=torch.float32).double() for c in coefficients)
    for coefficient in rest:
        real = (real * square.double() + coefficient).float().double()
    return real.float()


def _odd(x: Tensor, limit: float, top: Sequence[float], bottom: Sequence[float]) -> Tensor:
    """The quotient x * top(x**2) / bottom(x**2) within limits."""
    value = x.clamp(-limit, limit)
    square = value * value
    return _polynomial(square, top) * value / _polynomial(square, bottom)


def logistic(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32.

    >>> logistic(torch.tensor([0.0, 30.0]))
    tensor([0.5000, 1.0000])
    """
    return (_odd(x, 18.0, _LOGISTIC_TOP, _LOGISTIC_BOTTOM) + 0.5).clamp(0.0, 1.0)


def silu(x: Tensor) -> Tensor:
    """The product of x and its logistic, float32."""
    return x * logistic(x)


def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent, float32."""
    return _odd(x, 9.0, _TANH_TOP, _TANH_BOTTOM)

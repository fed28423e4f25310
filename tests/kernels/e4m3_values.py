"""Values that are hard to round to float8_e4m3fn, and what codes may differ by."""

import math

import torch

from pt2e_quant.core.formats.float_codes import encode_float
from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.kernels.epilogue.epilogue import Activation
from pt2e_quant.kernels.epilogue.reference import activate

__all__ = ["assert_codes_of_activation", "assert_near_codes", "hard_values", "same_codes"]

# What is left of a difference of numbers near 1 is off by last bits of 1, times x in a gelu.
_CANCELS = (Activation.GELU, Activation.GELU_TANH, Activation.TANH)


def hard_values():
    """Float32 values: every code, the middles between codes, their neighbours, and what is beyond.

    A middle's neighbour is nearer to one code by a last bit of float32, which a cast by way of
    float16 does not see.
    """
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[:-1] + codes[1:]) / 2
    above = torch.nextafter(middles, torch.tensor(math.inf))
    below = torch.nextafter(middles, torch.tensor(0.0))
    ends = torch.tensor([464.0, 480.0, 1e30, math.inf, math.nan, 1e-30, 2**-10, 2.0**-149])
    sizes = torch.cat([codes, middles, above, below, ends])
    return torch.cat([sizes, -sizes])


def same_codes(made, wanted, *, either_zero=False):
    """Whether codes are equal to the last bit; NaN equals NaN.

    either_zero: the sign of zeros is left out, as that of the greater of 0 and -0 is not defined.
    """
    assert made.dtype is wanted.dtype is torch.float8_e4m3fn
    assert made.shape == wanted.shape
    if either_zero:
        made, wanted = (
            torch.where(c.float() == 0, 0.0, c.float()).to(c.dtype) for c in (made, wanted)
        )
    are_nan = made.float().isnan() & wanted.float().isnan()
    return bool(((made.view(torch.uint8) == wanted.view(torch.uint8)) | are_nan).all())


def assert_near_codes(made, wanted):
    """At most the next code: what was rounded had other last bits."""
    assert made.dtype is wanted.dtype is torch.float8_e4m3fn
    assert made.stride() == wanted.stride()
    first, second = (_order(codes) for codes in (made, wanted))
    assert (first - second).abs().max() <= 1


def assert_codes_of_activation(codes, x, activation, scale):
    """Codes of values as near to an activation's in float64 as float32's arithmetic is.

    exp of a large argument is exact to 18 bits, and beyond e**80 is taken for that.
    """
    real = activate(x.double(), activation)
    error = real.abs() * 2.0**-18 + 2.0**-107
    if activation in _CANCELS:
        error += x.double().abs().clamp_min(1.0) * 2.0**-22
    ends = (encode_float(((real + e) / scale).float(), FP8_E4M3) for e in (-error, error))
    low, high = (_order(end) for end in ends)
    assert ((low <= _order(codes)) & (_order(codes) <= high)).all()


def _order(codes):
    """Codes as integers that rise with their values."""
    bits = codes.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)

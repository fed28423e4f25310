"""Codes of the small floats, exact: round to nearest, ties to even, saturate; and back.

Plain torch on the bits of float32, so that a graph of ATen operators can hold it.
"""

import torch
from torch import Tensor

from pt2e_quant.core.eager import is_eager
from pt2e_quant.core.formats.number_formats import FloatFormat

_MANTISSA = 23
_BIAS = 127


def encode_float(x: Tensor, form: FloatFormat, *, overwrite: bool = False) -> Tensor:
    """The codes nearest to real values.

    Values beyond the greatest saturate, infinities too. NaN stays NaN where the format has one
    and becomes 0 where it has none.

    Args:
        x: float, of any shape.
        form: the format.
        overwrite: the memory of x may be written to: a second tensor of that size takes longer to
            get than to fill.

    Returns:
        form.storage, shaped like x.
    """
    x = x.to(torch.float32)
    if form.storage != torch.uint8:
        # torch rounds to even as well; what lies beyond the greatest it treats in several ways.
        limited = x.clamp_(-form.max, form.max) if overwrite else x.clamp(-form.max, form.max)
        return limited.to(form.storage)
    # clamp leaves a NaN
    size = torch.where(x.isnan(), 0.0, x.abs().clamp(max=form.max))
    exponent = ((size.view(torch.int32) >> _MANTISSA) - _BIAS).clamp(min=form.min_exponent)
    # 2 ** (mantissa_bits - exponent), made of its bits; the product is exact.
    inverse = ((_BIAS + form.mantissa_bits - exponent) << _MANTISSA).view(torch.float32)
    steps = torch.round(size * inverse).to(torch.int32)
    # Steps count on into the next exponent, as codes do.
    code = ((exponent - form.min_exponent) << form.mantissa_bits) + steps
    sign = (x.view(torch.int32) >> 31) & 1
    return (code | (sign << (form.bits - 1))).to(torch.uint8)


def decode_float(codes: Tensor, form: FloatFormat) -> Tensor:
    """The real values of codes as float32, shaped like codes; exact."""
    if form.storage == torch.float8_e4m3fn and codes.is_cpu and is_eager(codes):
        return _decode_e4m3(codes)
    if form.storage != torch.uint8:
        return codes.to(torch.float32)
    code = codes.to(torch.int32)
    mantissa = code & ((1 << form.mantissa_bits) - 1)
    exponent = (code >> form.mantissa_bits) & ((1 << form.exponent_bits) - 1)
    is_normal = (exponent > 0).to(torch.int32)
    steps = (mantissa + (is_normal << form.mantissa_bits)).to(torch.float32)
    power = exponent - is_normal + form.min_exponent - form.mantissa_bits
    value = steps * ((power + _BIAS) << _MANTISSA).view(torch.float32)
    is_negative = (code >> (form.bits - 1)) & 1
    return torch.where(is_negative == 1, -value, value)


def _decode_e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn as float32, by way of float16, which has its values over 256.

    torch converts it one by one on CPUs; this is seven times as fast.
    """
    bits = codes.view(torch.int8).to(torch.int16)  # with the sign in the upper byte
    # The sizes of NaN, 127, get all the bits of float16's exponent.
    is_nan = bits.bitwise_and(127).add_(1).bitwise_and_(128)
    bits.bitwise_and_(~128).bitwise_or_(is_nan).bitwise_left_shift_(7)
    return bits.view(torch.float16).to(torch.float32).mul_(256.0)


def to_scale_dtype(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive scales in the dtype they are kept in; none becomes 0 or infinite, NaN stays.

    Round to nearest, but to float8_e8m0fnu (powers of two) down, as MX section 6.3 says; the
    least and greatest of the dtype bound them.
    """
    if dtype == torch.float32:
        return scale
    if dtype == torch.float8_e8m0fnu:
        # The exponent's bits are the code; those of a NaN are its NaN.
        exponent = (scale.view(torch.int32) >> _MANTISSA) & 255
        largest = torch.where(scale.isnan(), 255, exponent.clamp(max=254))
        return largest.to(torch.uint8).view(dtype)
    limits = torch.finfo(dtype)
    least = limits.smallest_normal if dtype == torch.bfloat16 else _SMALLEST[dtype]
    return scale.clamp(least, limits.max).to(dtype)


_SMALLEST = {torch.float16: 2.0**-24, torch.float8_e4m3fn: 2.0**-9, torch.float8_e5m2: 2.0**-16}
"""The least positive number of each dtype."""

"""The definitions of the operators of `core.format_ops`, in plain torch.

`block_size` and the scales' shape are those of `core.blocks`.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from pt2e_quant.core.eager import is_eager
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.blocks import check_blocks, grid_shape, spread, to_rows
from pt2e_quant.core.formats.code_books import check_table, decode_table, encode_table
from pt2e_quant.core.formats.float_codes import decode_float, encode_float, to_scale_dtype
from pt2e_quant.core.formats.number_formats import float_format


def quantize_block(
    x: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    block_size: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
) -> Tensor:
    """Integers: round(x * (1 / scale) + zero_point), ties to even, clamped to the range."""
    scale = _spread(scales.to(torch.float32), x, block_size)
    scaled = x.to(torch.float32) * (1.0 / scale)
    if zero_points is not None:
        scaled = scaled + _spread(zero_points, x, block_size)
    return torch.round(scaled).clamp(quant_min, quant_max).to(dtype)


def dequantize_block(
    codes: Tensor,
    scales: Tensor,
    zero_points: Tensor | None,
    block_size: Sequence[int],
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Real values: (q - zero_point) * scale in float32, then in out_dtype (float32 by default)."""
    steps = codes.to(torch.float32)
    scale = _spread(scales.to(torch.float32), codes, block_size)
    zero = None if zero_points is None else _spread(zero_points, codes, block_size)
    if is_eager(codes) and steps is not codes:
        # In place: memory for a second tensor of this size took half of the time of one row's
        # product.
        value = (steps if zero is None else steps.sub_(zero)).mul_(scale)
    else:
        value = (steps if zero is None else steps - zero) * scale
    return value.to(out_dtype or torch.float32)


def quantize_float(
    x: Tensor, scales: Tensor, tensor_scale: Tensor | None, block_size: Sequence[int], format: str
) -> Tensor:
    """Codes of x / scale: nearest, ties to even, saturated at the format's greatest."""
    scale = _spread(real_scale(scales, tensor_scale), x, block_size)
    scaled = x.to(torch.float32) / scale
    return encode_float(scaled, float_format(format), overwrite=is_eager(scaled))


def dequantize_float(
    codes: Tensor,
    scales: Tensor,
    tensor_scale: Tensor | None,
    block_size: Sequence[int],
    format: str,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Real values: a code's value times its scale in float32, then in out_dtype."""
    scale = _spread(real_scale(scales, tensor_scale), codes, block_size)
    return (decode_float(codes, float_format(format)) * scale).to(out_dtype or torch.float32)


def quantize_codebook(
    x: Tensor, table: Tensor, scales: Tensor | None, block_size: Sequence[int]
) -> Tensor:
    """Places of the table's values nearest to x / scale, the lower of two."""
    check_table(x.shape, table, block_size)
    scaled = x.to(torch.float32)
    if scales is not None:
        scaled = scaled / _spread(scales.to(torch.float32), x, block_size)
    return encode_table(scaled, table.to(torch.float32), block_size)


def dequantize_codebook(
    codes: Tensor,
    table: Tensor,
    scales: Tensor | None,
    block_size: Sequence[int],
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Real values: the table's value times the scale in float32, then in out_dtype."""
    check_table(codes.shape, table, block_size)
    value = decode_table(codes, table.to(torch.float32), block_size)
    if scales is not None:
        value = value * _spread(scales.to(torch.float32), codes, block_size)
    return value.to(out_dtype or torch.float32)


def choose_scales(
    x: Tensor,
    tensor_scale: Tensor | None,
    block_size: Sequence[int],
    limit: float,
    dtype: torch.dtype,
) -> Tensor:
    """The scales of `grid_shape` at which each block's greatest magnitude is `limit`.

    In float8_e8m0fnu they are those of MX section 6.3: the power of two not above the greatest
    magnitude, over the power of two not above `limit`; what then lies beyond `limit` saturates.
    A block of zeros gets the least scale of the dtype.

    Args:
        x: float.
        tensor_scale: what the scales are in units of.
        block_size: see `core.blocks`.
        limit: the greatest code's value.
        dtype: that the scales are kept in.
    """
    amax = block_amax(x, block_size)
    if tensor_scale is not None:
        amax = amax / tensor_scale.reshape((1,) * amax.dim())
    return scale_of_amax(amax, limit, dtype)


def block_amax(x: Tensor, block_size: Sequence[int]) -> Tensor:
    """The greatest magnitude of each block: float32 of `grid_shape`."""
    check_blocks(block_size, x.dim())
    amax = to_rows(x.to(torch.float32).abs(), block_size).amax(1)
    return amax.reshape(grid_shape(x.shape, block_size))


def scale_of_amax(amax: Tensor, limit: float, dtype: torch.dtype) -> Tensor:
    """The scales at which greatest magnitudes, float32, are `limit`: see `choose_scales`."""
    if dtype == torch.float8_e8m0fnu:
        scale = amax / 2.0 ** _exponent(limit)
    else:
        scale = (amax / limit).clamp(min=torch.finfo(torch.float32).tiny)
    return to_scale_dtype(scale, dtype)


def real_scale(scales: Tensor, tensor_scale: Tensor | None) -> Tensor:
    """The scales as float32, times the tensor's."""
    scale = scales.to(torch.float32)
    return scale if tensor_scale is None else scale * tensor_scale.reshape((1,) * scale.dim())


def _exponent(value: float) -> int:
    """The exponent of the power of two not above a positive number."""
    return math.frexp(value)[1] - 1


def check_scales(scale: Tensor, x: Tensor, block: Sequence[int]) -> None:
    """Check that scales are those of a tensor's blocks.

    Raises:
        ConfigError: they have another shape.
    """
    expected = grid_shape(x.shape, block)
    if scale.dim() != len(expected) or any(
        isinstance(a, int) and isinstance(b, int) and a != b
        for a, b in zip(scale.shape, expected, strict=True)
    ):
        raise ConfigError(
            f"blocks of {list(block)} in {list(x.shape)} have scales of {list(expected)}, "
            f"found {list(scale.shape)}"
        )


def _spread(scale: Tensor, x: Tensor, block: Sequence[int]) -> Tensor:
    check_scales(scale, x, block)
    return spread(scale, x.shape, block)

"""Qparams of a tensor in blocks: by the greatest magnitude, or the least squared error.

The error is that of the scales as they are kept (a power of two, eight bits), not before.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams, keep_scale
from pt2e_quant.core.formats.blocks import WHOLE, block_lengths, grid_shape, to_rows
from pt2e_quant.core.formats.code_books import decode_table, encode_table, fit_tables
from pt2e_quant.core.formats.float_codes import decode_float, encode_float, to_scale_dtype
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat, NumberFormat
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.one_thread import one_thread
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.weights.weight_search import WeightSearch, search_qparams

_BLOCK = 1 << 18
"""Elements searched at a time: several passes over them stay in the cache."""

_SHRINKS = torch.linspace(0.6, 1.2, 13).tolist()
"""Parts of the scale of the greatest magnitude that are tried."""
_POWERS = (0.5, 1.0, 2.0)
"""Parts of that scale that are tried where only powers of two can be kept."""

_TINY = torch.finfo(torch.float32).tiny


Ends = tuple[Tensor, Tensor]
"""The least and the greatest value of each block, in the order of `blocks.to_rows`."""


def find_ends(x: Tensor, scheme: TensorScheme) -> Ends:
    """The least and the greatest value of each block of a tensor, as float32; NaN where one is.

    A block that reaches beyond the tensor has zeros there.
    """
    rows = to_rows(x, block_lengths(scheme.granularity, x.dim()))
    return rows.amin(1).to(torch.float32), rows.amax(1).to(torch.float32)


def find_block_qparams(
    x: Tensor, scheme: TensorScheme, search: WeightSearch, ends: Ends | None = None
) -> BlockQParams:
    """The qparams of a constant tensor.

    Args:
        x: finite values.
        scheme: what it is quantized to.
        search: MIN_MAX takes the greatest magnitude (the range, if affine). MSE tries scales
            around it. HQQ is for integers alone. A code of one bit always takes MSE: a range
            says nothing about it. A fitted code book is k-means in any case.
        ends: of its blocks, from `find_ends`, if they are known.

    Raises:
        ConfigError: the scheme's blocks are none of this tensor, or the search none of its
            format.
    """
    with one_thread():
        return _find(x, scheme, search, ends)


def _find(x: Tensor, scheme: TensorScheme, search: WeightSearch, ends: Ends | None) -> BlockQParams:
    block = block_lengths(scheme.granularity, x.dim())
    form = scheme.format
    if form is None:
        return _integers(x, scheme, block, search)
    if search is WeightSearch.HQQ:
        raise ConfigError(f"HQQ is for integers, not {form}", fix="search=WeightSearch.MSE")
    if isinstance(form, CodeBook):
        _check_whole_blocks(x, block, form)
        if form.is_fitted:
            return _fitted(x, scheme, block, form)
    low, high = find_ends(x, scheme) if ends is None else ends
    base = _scale_of(torch.maximum(high, -low), form, scheme.scales)
    grid = grid_shape(x.shape, block)
    tensor_scale = keep_scale(base.reshape(grid), scheme.scales).tensor_scale
    if search is WeightSearch.MSE or form.bits == 1:
        rows = to_rows(x.to(torch.float32), block)
        base = _least_error(rows, base, form, scheme.scales, tensor_scale)
    return BlockQParams(
        scheme=scheme,
        block=block,
        scale=keep_scale(base.reshape(grid), scheme.scales, tensor_scale),
        table=form.table() if isinstance(form, CodeBook) else None,
    )


def qparams_of_amax(amax: Tensor, scheme: TensorScheme, dim: int) -> BlockQParams:
    """The qparams of a small float with one scale, at which a magnitude is the greatest code's.

    Args:
        amax: float32, one element.
        scheme: what the tensor is quantized to.
        dim: the number of dimensions of the tensor.
    """
    form = scheme.format
    assert form is not None
    scale = _scale_of(amax.reshape((1,) * dim).to(torch.float32), form, scheme.scales)
    return BlockQParams(
        scheme=scheme,
        block=(WHOLE,) * dim,
        scale=keep_scale(scale, scheme.scales),
        table=form.table() if isinstance(form, CodeBook) else None,
    )


def _integers(
    x: Tensor, scheme: TensorScheme, block: tuple[int, ...], search: WeightSearch
) -> BlockQParams:
    low, high = scheme.range
    rows = to_rows(x.to(torch.float32), block)
    scale, zero_point = search_qparams(
        rows, search, quant_min=low, quant_max=high, symmetric=scheme.symmetric
    )
    grid = grid_shape(x.shape, block)
    form = scheme.scales
    if form.dtype == torch.float8_e8m0fnu:
        form = replace(form, is_power_of_two=True)  # up: rounded down it would clip half a range
    kept = keep_scale(scale.reshape(grid), form)
    zero: Tensor | None = zero_point.reshape(grid)
    if scheme.symmetric and low < 0:
        zero = None
    elif not scheme.symmetric:
        # The same least value on the scale that is kept.
        least = (low - zero_point.reshape(grid)) * scale.reshape(grid)
        zero = (low - torch.round(least / kept.real())).clamp(low, high).to(torch.int32)
    return BlockQParams(scheme=scheme, block=block, scale=kept, zero_point=zero)


def _fitted(
    x: Tensor, scheme: TensorScheme, block: tuple[int, ...], form: CodeBook
) -> BlockQParams:
    dtype = scheme.scales.dtype
    if not scheme.scales.is_plain and dtype not in (torch.float16, torch.bfloat16):
        raise ConfigError(f"the values of a code book are not kept as {scheme.scales}")
    tables = fit_tables(to_rows(x.to(torch.float32), block), 1 << form.bits).to(dtype)
    grid = grid_shape(x.shape, block)
    is_one = all(count == 1 for count in grid)
    table = tables.reshape(-1) if is_one else tables.reshape(*grid, -1)
    return BlockQParams(scheme=scheme, block=block, scale=None, table=table)


def _check_whole_blocks(x: Tensor, block: tuple[int, ...], form: CodeBook) -> None:
    ragged = any(length > 0 and size % length for size, length in zip(x.shape, block, strict=True))
    if ragged:
        raise ConfigError(
            f"blocks of {list(block)} do not divide a weight of shape {tuple(x.shape)}, which "
            f"{form} needs"
        )


def _scale_of(amax: Tensor, form: NumberFormat, scales: ScaleFormat) -> Tensor:
    """The scale at which a magnitude is the format's greatest; for MX, section 6.3's power of two.

    See `format_ops.choose_scales`, which finds the same at run time.
    """
    limit = form.max
    if scales.dtype == torch.float8_e8m0fnu and isinstance(form, FloatFormat):
        limit = 2.0 ** (torch.tensor(form.max).frexp().exponent.item() - 1)
        return to_scale_dtype(amax / limit, scales.dtype).to(torch.float32)
    return (amax / limit).clamp(min=_TINY)


def _least_error(
    rows: Tensor,
    base: Tensor,
    form: NumberFormat,
    scales: ScaleFormat,
    tensor_scale: Tensor | None,
) -> Tensor:
    """The scale of least squared error for each row, among those around `base`."""
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    through = _through(form)

    def kept(scale: Tensor) -> Tensor:
        if scales.double_group is not None:
            return scale  # its steps depend on all scales; they are fine enough
        form_alone = keep_scale(scale.clamp(min=_TINY), scales, tensor_scale)
        return form_alone.real()

    found = [
        _search_rows(rows[i : i + step], base[i : i + step], through, kept, scales)
        for i in range(0, rows.shape[0], step)
    ]
    return torch.cat(found)


def _search_rows(
    rows: Tensor,
    base: Tensor,
    through: Callable[[Tensor], Tensor],
    kept: Callable[[Tensor], Tensor],
    scales: ScaleFormat,
) -> Tensor:
    best = kept(base)
    least = torch.full_like(best, torch.inf)
    is_power = scales.is_power_of_two or scales.dtype == torch.float8_e8m0fnu
    for shrink in (1.0, *(_POWERS if is_power else _SHRINKS)):
        scale = kept(base * shrink)
        codes = through(rows / scale.unsqueeze(1))
        if not is_power:
            # Given the codes, the scale of least squared error.
            fitted = (rows * codes).sum(1) / codes.square().sum(1).clamp(min=_TINY)
            scale = kept(torch.where((fitted > _TINY) & fitted.isfinite(), fitted, scale))
            codes = through(rows / scale.unsqueeze(1))
        error = (codes * scale.unsqueeze(1)).sub_(rows).square_().sum(1)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def _through(form: NumberFormat) -> Callable[[Tensor], Tensor]:
    """Values in units of a scale to the nearest that the format has."""
    if isinstance(form, FloatFormat):
        return lambda scaled: decode_float(encode_float(scaled, form), form)
    table = form.table()
    own = (1, WHOLE)
    return lambda scaled: decode_table(
        encode_table(scaled, table.to(scaled.device), own), table.to(scaled.device), own
    )

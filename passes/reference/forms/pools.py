"""Forms of pools: averages over windows, maxima."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.integer_ops.profiles import Averaging
from pt2e_quant.core.integer_ops.requantize import requantize
from pt2e_quant.core.integer_ops.sums import add_up, divided, reciprocal_of
from pt2e_quant.core.integer_ops.windows import Windows, WindowSum, pool_windows
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL1D,
    ADAPTIVE_AVG_POOL2D,
    AVG_POOL1D,
    AVG_POOL2D,
    MAX_POOL1D,
    MAX_POOL2D,
    MAX_POOL3D,
    MEAN,
    aten,
    each_axis,
)
from pt2e_quant.graph.pattern import one_of
from pt2e_quant.passes.reference.forms.moves import is_same_scale, rescaled
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Overflow, Site

_INT32 = (1 << 31) - 1
_WEIGHT = 127
"""The weight of 1 of a pool that is a convolution in int8."""


def _max_pool(site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    # Padding is the least integer, as -inf is the least real number.
    rest = [value for name, value in site.arguments.items() if name != "self"]
    pooled = site.call(aten.max_pool2d.default, x.value, *rest)
    return rescaled(site, x, pooled, output)


def _flat_max_pool(site: Site[Any]) -> Any:
    """max_pool1d as max_pool2d of one row: torch has no integer kernel for it."""
    x, output, given = site.operand("self"), site.required_output(), site.arguments
    kernel, stride, padding, dilation = (
        list(given[name]) for name in ("kernel_size", "stride", "padding", "dilation")
    )
    row = site.call(aten.unsqueeze.default, x.value, -2)
    sizes = [1, *kernel], [1, *(stride or kernel)], [0, *padding], [1, *dilation]
    pooled = site.call(aten.max_pool2d.default, row, *sizes, given["ceil_mode"])
    return rescaled(site, x, site.call(aten.squeeze.dim, pooled, -2), output)


def _mean(site: Site[Any]) -> Any:
    dims = site.arguments["dim"]
    if site.arguments["dtype"] is not None or not dims:
        raise Declined("mean over no named dimension, or in another dtype")
    return _average(site, dims, keepdim=bool(site.arguments["keepdim"]))


def _adaptive(site: Site[Any]) -> Any:
    x, sizes = site.operand("self"), list(site.arguments["output_size"])
    if all(size == 1 for size in sizes):
        return _average(site, list(range(-len(sizes), 0)), keepdim=True)
    found = []
    for size, wanted in zip(_spatial(x, len(sizes)), sizes, strict=True):
        starts = [i * size // wanted for i in range(wanted)]
        ends = [-(-(i + 1) * size // wanted) for i in range(wanted)]
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        found.append(Windows(starts=starts, ends=ends, counts=counts))
    return _over_windows(site, x, found)


def _windowed(site: Site[Any]) -> Any:
    x, given = site.operand("self"), site.arguments
    rank = len(given["kernel_size"]) if len(given["kernel_size"]) > 1 else site.like.dim() - 2
    kernel = each_axis(given["kernel_size"], rank)
    stride = each_axis(given["stride"] or kernel, rank)
    padding = each_axis(given["padding"], rank)
    found = [
        pool_windows(
            size,
            *moved,
            is_ceil=given["ceil_mode"],
            counts_padding=given["count_include_pad"],
        )
        for size, *moved in zip(_spatial(x, rank), kernel, stride, padding, strict=True)
    ]
    return _over_windows(site, x, found, given.get("divisor_override"))


def _spatial(x: Operand[Any], rank: int) -> list[int]:
    sizes = list(x.like.shape[-rank:])
    if not all(isinstance(size, int) for size in sizes):
        raise Declined("averages over windows of a dynamic dimension")
    return sizes


def _over_windows(
    site: Site[Any], x: Operand[Any], windows: Sequence[Windows], divisor: int | None = None
) -> Any:
    rank = len(windows)
    counts = torch.ones([1] * rank, dtype=torch.int64)
    for dim, window in enumerate(windows):
        shape = [1] * rank
        shape[dim] = -1
        counts = counts * torch.tensor(window.counts).reshape(shape)
    if divisor is not None:
        counts = torch.full_like(counts, divisor)
    if int(counts.max()) * x.reach > _INT32 and site.arithmetic.accumulator_bits == 32:
        raise Overflow("the sum over a window may not fit in int32")
    if bool((counts == counts.flatten()[0]).all()):
        counts = counts.flatten()[:1]
    total = widen(site.call, x.value, x.qparams.zero_point_int, x.storage)
    for dim, window in enumerate(windows):
        total = site.call(WindowSum, total, dim - rank, window.starts, window.ends)
    is_weighted = site.arithmetic.profile.averaging is Averaging.WEIGHTED
    if is_weighted and counts.numel() == 1 and int(counts) * _WEIGHT * x.reach <= _INT32:
        weighted = site.call(aten.mul.Tensor, total, _WEIGHT)
        scale = 1.0 / (_WEIGHT * counts.double())
        return site.requantized(weighted, (x.qparams.scale, scale.float()))
    return _averaged(site, x, total, counts)


def _average(site: Site[Any], dims: Sequence[int], *, keepdim: bool) -> Any:
    x = site.operand("self")
    sizes = [x.like.shape[d] for d in dims]
    if not all(isinstance(size, int) for size in sizes):
        raise Declined("averages over a dynamic dimension")
    count = math.prod(sizes)
    if count * x.reach > _INT32:
        raise Overflow("the sum of an average may not fit in int32")
    zero = x.qparams.zero_point_int
    total = add_up(site.call, x.value, dims, keepdim=keepdim, zero_point=zero, storage=x.storage)
    return _averaged(site, x, total, torch.tensor([count]))


def _averaged(site: Site[Any], x: Operand[Any], total: Any, counts: torch.Tensor) -> Any:
    """A sum of (x - zero_point) divided by how many terms count."""
    output, call = site.required_output(), site.call
    averaging = site.arithmetic.profile.averaging
    if averaging is Averaging.RECIPROCAL and is_same_scale(x, output):
        factor = reciprocal_of(counts).held(site.hold)
        return requantize(call, total, factor, output.range)
    if averaging is Averaging.DIVIDED and is_same_scale(x, output):
        stored = call(aten.add.Tensor, cast(call, total, torch.int64), _held(site, counts, x))
        return divided(call, stored, site.hold(counts, "count"), output.range)
    return site.requantized(total, (x.qparams.scale,), divisor=counts.float())


def _held(site: Site[Any], counts: torch.Tensor, x: Operand[Any]) -> Any:
    """The zero points in each sum of integers as they are stored."""
    return site.literal(counts * x.qparams.zero_point_int, "zero_sum")


POOL_FORMS = (
    IntegerForm(name="max_pool", operators=one_of(MAX_POOL2D, MAX_POOL3D), write=_max_pool),
    IntegerForm(name="max_pool1d", operators=MAX_POOL1D, write=_flat_max_pool),
    IntegerForm(name="average", operators=MEAN, write=_mean),
    IntegerForm(
        name="adaptive average",
        operators=one_of(
            ADAPTIVE_AVG_POOL1D, ADAPTIVE_AVG_POOL2D, (aten.adaptive_avg_pool3d.default,)
        ),
        write=_adaptive,
    ),
    IntegerForm(
        name="windowed average",
        operators=one_of(AVG_POOL1D, AVG_POOL2D, (aten.avg_pool3d.default,)),
        write=_windowed,
    ),
)
"""Pools and averages."""

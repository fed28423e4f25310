"""Forms of sums, averages and maxima over dimensions or windows, and of resizes."""

import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.integer_ops.norms import Root
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
from pt2e_quant.passes.reference.forms.site import (
    UNKNOWN_LENGTH,
    Declined,
    IntegerForm,
    Operand,
    Overflow,
    Site,
)

_INT32 = (1 << 31) - 1
_WEIGHT = 127
"""The weight of 1 of a pool that is a convolution in int8."""


def _max_pool(pool: Any, site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    # Padding is the least integer, as -inf is the least real number.
    rest = [value for name, value in site.arguments.items() if name != "self"]
    pooled = site.call(pool, x.value, *rest)
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


def _sum(site: Site[Any]) -> Any:
    dims, keepdim = _reduced(site)
    x = site.operand("self")
    total, reach = _total(site, x, dims, keepdim=keepdim)
    return site.requantized(total, (x.qparams.scale,), reach=reach)


def _cumulative_sum(site: Site[Any]) -> Any:
    x, call, dim = site.operand("self"), site.call, site.arguments["dim"]
    reach, accumulator = _accumulator(site, x, [dim] if x.like.dim() else [])
    wide = cast(call, widen(call, x.value, x.qparams.zero_point_int, x.storage), accumulator)
    total = call(aten.cumsum.default, wide, dim, dtype=accumulator)
    return site.requantized(total, (x.qparams.scale,), reach=reach)


def _mean(site: Site[Any]) -> Any:
    dims, keepdim = _reduced(site)
    return _average(site, dims, keepdim=keepdim)


_ROOT_BITS = 30


def _vector_norm(site: Site[Any]) -> Any:
    """The root of the sum of squares, with as many bits below a step as int32 has left."""
    if site.arguments["ord"] != 2:
        raise Declined("it is no Euclidean norm")
    dims, keepdim = _reduced(site)
    x, call = site.operand("self"), site.call
    terms = _terms(x, dims)
    reach = (UNKNOWN_LENGTH if terms is None else terms) * x.reach**2
    bits = _ROOT_BITS - -(-reach.bit_length() // 2)
    if bits < 1:
        raise Declined("its sum of squares is out of reach of 64-bit integers")
    wide = cast(call, widen(call, x.value, x.qparams.zero_point_int, x.storage), torch.int64)
    total = call(aten.sum.dim_IntList, call(aten.mul.Tensor, wide, wide), dims, keepdim)
    root = call(Root, call(aten.mul.Tensor, total, 1 << (2 * bits)))
    return site.requantized(root, (x.qparams.scale, torch.tensor([2.0**-bits])))


def _variance(site: Site[Any]) -> Any:
    spread, count, scale, reach = _spread(site)
    return site.requantized(spread, (scale, scale), divisor=count, reach=reach**2)


def _deviation(site: Site[Any]) -> Any:
    """The root of the variance, with as many bits below a step as int64 has left."""
    spread, count, scale, reach = _spread(site)
    bits = (_SPREAD_BITS - (reach**2).bit_length()) // 2
    root = site.call(Root, site.call(aten.mul.Tensor, spread, 1 << (2 * bits)))
    unit = torch.tensor([2.0**-bits])
    return site.requantized(root, (scale, unit), divisor=count.sqrt(), reach=reach << bits)


_SPREAD_BITS = 62


def _spread(site: Site[Any]) -> tuple[Any, torch.Tensor, torch.Tensor, int]:
    """In int64 n * sum(q**2) - sum(q)**2; n * (n - correction), the scale, the reach of a sum.

    Their quotient is the variance in squares of steps: exact until its one rounding.
    """
    dims, keepdim = _reduced(site)
    x, call, given = site.operand("self"), site.call, site.arguments
    correction = given.get("correction", int(given.get("unbiased", True)))
    correction = 1 if correction is None else correction
    count = _terms(x, dims)
    if count is None:
        raise Declined("deviations over a dynamic dimension")
    if count - correction <= 0:
        raise Declined("it has no more values than its correction")
    if (count * x.reach) ** 2 >= 1 << _SPREAD_BITS:
        raise Declined("its sum of squares is out of reach of 64-bit integers")
    wide = cast(call, widen(call, x.value, x.qparams.zero_point_int, x.storage), torch.int64)
    squares = call(aten.sum.dim_IntList, call(aten.mul.Tensor, wide, wide), dims, keepdim)
    total = call(aten.sum.dim_IntList, wide, dims, keepdim)
    spread = call(
        aten.sub.Tensor, call(aten.mul.Tensor, squares, count), call(aten.mul.Tensor, total, total)
    )
    return (
        spread,
        torch.tensor([float(count * (count - correction))]),
        x.qparams.scale,
        count * x.reach,
    )


def _reduced(site: Site[Any]) -> tuple[list[int], bool]:
    """The dimensions that a sum or mean goes over, all if none is named, and keepdim."""
    given = site.arguments
    if not site.like.dtype.is_floating_point:
        raise Declined("its result is in another dtype")
    dims = given.get("dim") or range(site.operand("self").like.dim())
    return list(dims), bool(given.get("keepdim"))


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
    reach = int(counts.max()) * x.reach
    if reach > _INT32 and site.arithmetic.accumulator_bits == 32:
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
    return _averaged(site, x, total, counts, reach)


def _average(site: Site[Any], dims: Sequence[int], *, keepdim: bool) -> Any:
    x = site.operand("self")
    count = _terms(x, dims)
    if count is None:
        raise Declined("averages over a dynamic dimension")
    total, reach = _total(site, x, dims, keepdim=keepdim)
    return _averaged(site, x, total, torch.tensor(count), reach)


def _terms(x: Operand[Any], dims: Sequence[int]) -> int | None:
    """Return the number of values of a sum over dimensions, None if a dimension is dynamic."""
    sizes = [x.like.shape[d] for d in dims]
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _accumulator(site: Site[Any], x: Operand[Any], dims: Sequence[int]) -> tuple[int, torch.dtype]:
    """The greatest sum of abs(x - zero_point) over dimensions, and the dtype that holds it."""
    terms = _terms(x, dims)
    reach = (UNKNOWN_LENGTH if terms is None else terms) * x.reach
    is_long = terms is None or site.arithmetic.accumulator_bits == 64
    if reach > _INT32 and not is_long:
        raise Overflow(f"a sum may not fit in int32: {terms} terms reach {reach}")
    return reach, torch.int64 if is_long else torch.int32


def _total(
    site: Site[Any], x: Operand[Any], dims: Sequence[int], *, keepdim: bool
) -> tuple[Any, int]:
    """The sum of (x - zero_point) over dimensions, and its reach."""
    reach, accumulator = _accumulator(site, x, dims)
    total = add_up(
        site.call,
        x.value,
        dims,
        keepdim=keepdim,
        zero_point=x.qparams.zero_point_int,
        storage=x.storage,
        accumulator=accumulator,
    )
    return total, reach


def _averaged(
    site: Site[Any], x: Operand[Any], total: Any, counts: torch.Tensor, reach: int
) -> Any:
    """A sum of (x - zero_point) divided by how many terms count."""
    output, call = site.required_output(), site.call
    averaging = site.arithmetic.profile.averaging
    if averaging is Averaging.RECIPROCAL and is_same_scale(x, output):
        factor = reciprocal_of(counts).held(site.hold)
        return requantize(call, total, factor, output.range)
    if averaging is Averaging.DIVIDED and is_same_scale(x, output):
        stored = call(aten.add.Tensor, cast(call, total, torch.int64), _held(site, counts, x))
        return divided(call, stored, site.hold(counts, "count"), output.range)
    return site.requantized(total, (x.qparams.scale,), divisor=counts.float(), reach=reach)


def _held(site: Site[Any], counts: torch.Tensor, x: Operand[Any]) -> Any:
    """The zero points in each sum of integers as they are stored."""
    return site.literal(counts * x.qparams.zero_point_int, "zero_sum")


_BYTE_WEIGHT_BITS = 11
"""Of the weights of neighbours, as XNNPACK has them (s8-ibilinear); two axes fit in int32."""


def _resize(site: Site[Any]) -> Any:
    """Sums of neighbours with weights in fixed point, axis by axis, rounded once."""
    x, output = site.operand("input"), site.required_output()
    rank = site.like.dim() - 2
    sizes = (*x.like.shape[2:], *site.like.shape[2:])
    if not all(isinstance(size, int) for size in sizes):
        raise Declined("it resizes a dynamic dimension")
    is_narrow = x.storage.itemsize == 1 and rank < 3
    bits = _BYTE_WEIGHT_BITS if is_narrow else 60 // (rank + 1)
    taps = [_taps(site, axis, rank, bits) for axis in range(rank)]
    reach = x.reach * math.prod(int(weights.abs().sum(0).max()) for _, weights in taps)
    dtype = torch.int32 if reach <= _INT32 else torch.int64
    call = site.call
    total = cast(call, widen(call, x.value, x.qparams.zero_point_int, x.storage), dtype)
    for axis, (places, weights) in enumerate(taps):
        shape = [-1, *[1] * (rank - 1 - axis)]
        parts = []
        for number, (place, weight) in enumerate(zip(places, weights, strict=True)):
            index = site.hold(place, f"places_{axis}_{number}")
            factor = site.hold(weight.to(dtype).reshape(shape), f"weights_{axis}_{number}")
            values = call(aten.index_select.default, total, axis + 2, index)
            parts.append(call(aten.mul.Tensor, values, factor))
        total = reduce(partial(call, aten.add.Tensor), parts)
    scale = torch.tensor([2.0 ** -(bits * rank)])
    return site.requantized(total, (x.qparams.scale, scale), reach=reach, output=output)


def _taps(site: Site[Any], axis: int, rank: int, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places that a resize reads along an axis, and integer weights, each [taps, size].

    The weights are what the float operator makes of unit vectors; those of a place add up to
    2**bits.
    """
    given = dict(site.arguments)
    size, wanted = site.operand("input").like.shape[axis + 2], site.like.shape[axis + 2]
    shape = [1] * rank
    if given["scale_factors"] is None:
        given["output_size"] = [*shape[:axis], wanted, *shape[axis + 1 :]]
    else:
        factor = given["scale_factors"][axis]
        given["scale_factors"] = [*shape[:axis], factor, *shape[axis + 1 :]]
    shape[axis] = size
    given["input"] = torch.eye(size, dtype=torch.float64).reshape(size, 1, *shape)
    matrix = site.target(**given).reshape(size, wanted)
    places = matrix.abs().topk(int((matrix != 0).sum(0).max()), 0).indices
    weights = (matrix.gather(0, places) * 2**bits).round().to(torch.int64)
    weights[0] += 2**bits - weights.sum(0)
    return places, weights


_RESIZES = (
    aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_bicubic2d.vec,
    aten.upsample_trilinear3d.vec,
)

_VARIANCES = (aten.var.default, aten.var.dim, aten.var.correction)
_DEVIATIONS = (aten.std.default, aten.std.dim, aten.std.correction)

POOL_FORMS = (
    IntegerForm(
        name="max_pool", operators=MAX_POOL2D[:1], write=partial(_max_pool, aten.max_pool2d.default)
    ),
    IntegerForm(
        name="max_pool3d", operators=MAX_POOL3D, write=partial(_max_pool, aten.max_pool3d.default)
    ),
    IntegerForm(name="max_pool1d", operators=MAX_POOL1D, write=_flat_max_pool),
    IntegerForm(name="sum", operators=(aten.sum.default, aten.sum.dim_IntList), write=_sum),
    IntegerForm(name="cumulative sum", operators=(aten.cumsum.default,), write=_cumulative_sum),
    IntegerForm(
        name="vector norm", operators=(aten.linalg_vector_norm.default,), write=_vector_norm
    ),
    IntegerForm(name="variance", operators=_VARIANCES, write=_variance),
    IntegerForm(name="deviation", operators=_DEVIATIONS, write=_deviation),
    IntegerForm(name="average", operators=one_of(MEAN, (aten.mean.default,)), write=_mean),
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
    IntegerForm(name="resize", operators=_RESIZES, write=_resize),
)
"""Pools, sums and averages, resizes."""

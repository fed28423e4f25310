"""Forms of sums, averages, clamps and of what only moves integers."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.integer_ops.profiles import Addition
from pt2e_quant.core.integer_ops.quantize import dequantize, quantize
from pt2e_quant.core.integer_ops.requantize import OutputRange, factor_of, requantize
from pt2e_quant.core.integer_ops.sums import add, add_by_ratios, add_up, common_shift
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL2D,
    ADD,
    CAT,
    CLAMP,
    HARDTANH,
    MAX_POOL2D,
    MEAN,
    PERMUTE,
    RELU,
    RESHAPE,
    SELECT,
    SLICE,
    SQUEEZE,
    SUB,
    UNSQUEEZE,
    aten,
)
from pt2e_quant.graph.pattern import one_of
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Output, Site

__all__ = ["ARITHMETIC_FORMS", "REQUANTIZE", "rescaled"]

_INT32 = (1 << 31) - 1


def _is_same(a: QParams, b: QParams) -> bool:
    return (
        a.scale_float == b.scale_float
        and a.zero_point_int == b.zero_point_int
        and (a.quant_min, a.quant_max, a.dtype) == (b.quant_min, b.quant_max, b.dtype)
    )


def rescaled(site: Site[Any], x: Operand[Any], integers: Any, output: Output) -> Any:
    """Integers of x's scale in the output's; untouched where both are the same."""
    out = output.range
    if _is_same(x.qparams, output.qparams):
        limits = output.qparams.quant_min, output.qparams.quant_max
        if (out.low, out.high) == limits:
            return integers
        return site.call(aten.clamp.default, integers, out.low, out.high)
    wide = widen(site.call, integers, x.qparams.zero_point_int, x.storage)
    return site.requantized(wide, (x.qparams.scale,), output=output)


def _add(site: Site[Any]) -> Any:
    return _sum(site, site.arguments["alpha"])


def _subtract(site: Site[Any]) -> Any:
    return _sum(site, -site.arguments["alpha"])


def _sum(site: Site[Any], alpha: float) -> Any:
    """The sum x + alpha * y by the profile's arithmetic."""
    x, y = site.operand("self"), site.operand("other")
    if max(x.storage.itemsize, y.storage.itemsize) > 2:
        raise Declined("summands are wider than 16 bits")
    scale = site.required_output().qparams.scale
    zero_points = x.qparams.zero_point_int, y.qparams.zero_point_int
    match site.arithmetic.profile.addition:
        case Addition.RESCALED:
            return _sum_of_rescaled(site, x, y, alpha)
        case Addition.REAL:
            return _sum_of_reals(site, x, y, alpha)
        case Addition.FLOAT_RATIOS:
            ratios = float(x.qparams.scale / scale), alpha * float(y.qparams.scale / scale)
            values = x.value, y.value
            out = site.required_output().range
            return add_by_ratios(site.call, *values, ratios, out, zero_points=zero_points)
        case Addition.MULTIPLIERS_OF_21_BITS:
            first, second = (float(v.qparams.scale / scale) for v in (x, y))
            factors = common_shift(first, alpha * second, bits=21)
        case _:
            first, second = (v.qparams.scale_float / float(scale) for v in (x, y))
            factors = common_shift(first, alpha * second)
    if factors is None:
        raise Declined("the summands' scales are far above the output's")
    return add(
        site.call,
        x.value,
        y.value,
        factors,
        site.required_output().range,
        zero_points=zero_points,
        storages=(x.storage, y.storage),
    )


def _sum_of_rescaled(site: Site[Any], x: Operand[Any], y: Operand[Any], alpha: float) -> Any:
    """Both in steps of twice the greater scale / 2**20, as TFLite's reference/add.h has it."""
    left_shift = 20 if max(x.storage.itemsize, y.storage.itemsize) == 1 else 15
    scales = x.qparams.scale.double(), y.qparams.scale.double() * abs(alpha)
    twice = 2.0 * torch.maximum(*scales)
    profile, call = site.arithmetic.profile, site.call
    wide = OutputRange(zero_point=0, low=-_INT32 - 1, high=_INT32, storage=torch.int32)
    parts = []
    for operand, scale in zip((x, y), scales, strict=True):
        steps = widen(call, operand.value, operand.qparams.zero_point_int, operand.storage)
        shifted = call(aten.mul.Tensor, cast(call, steps, torch.int32), 1 << left_shift)
        kind, bits = profile.requantization, profile.multiplier_bits
        factor = factor_of(kind, (scale,), twice, bits=bits).held(site.hold)
        parts.append(requantize(call, shifted, factor, wide))
    combine = aten.add.Tensor if alpha > 0 else aten.sub.Tensor
    total = call(combine, *parts)
    return site.requantized(total, (twice / (1 << left_shift),))


def _sum_of_reals(site: Site[Any], x: Operand[Any], y: Operand[Any], alpha: float) -> Any:
    """Both dequantized, added in float32, quantized."""
    real = [
        dequantize(site.call, v.value, v.qparams.scale_float, v.qparams.zero_point_int)
        for v in (x, y)
    ]
    total = site.call(aten.add.Tensor, *real, alpha=alpha)
    output = site.required_output()
    out = output.range
    return quantize(
        site.call,
        total,
        1.0 / output.qparams.scale_float,
        out.zero_point,
        limits=(out.low, out.high),
        storage=out.storage,
    )


def _max_pool(site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    # Padding is the least integer, as -inf is the least real number.
    rest = [value for name, value in site.arguments.items() if name != "self"]
    pooled = site.call(aten.max_pool2d.default, x.value, *rest)
    return rescaled(site, x, pooled, output)


def _mean(site: Site[Any]) -> Any:
    dims = site.arguments["dim"]
    if site.arguments["dtype"] is not None or not dims:
        raise Declined("mean over no named dimension, or in another dtype")
    return _average(site, dims, keepdim=bool(site.arguments["keepdim"]))


def _global_average(site: Site[Any]) -> Any:
    if list(site.arguments["output_size"]) != [1, 1]:
        raise Declined("averages over windows")
    return _average(site, [-2, -1], keepdim=True)


def _average(site: Site[Any], dims: Sequence[int], *, keepdim: bool) -> Any:
    x = site.operand("self")
    sizes = [x.like.shape[d] for d in dims]
    if not all(isinstance(size, int) for size in sizes):
        raise Declined("averages over a dynamic dimension")
    count = math.prod(sizes)
    if count * x.reach > _INT32:
        raise Declined("the sum may not fit in int32")
    zero = x.qparams.zero_point_int
    total = add_up(site.call, x.value, dims, keepdim=keepdim, zero_point=zero, storage=x.storage)
    return site.requantized(total, (x.qparams.scale,), divisor=count)


def _move(site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    rest = [value for name, value in site.arguments.items() if name != "self"]
    return rescaled(site, x, site.call(site.target, x.value, *rest), output)


def _clamp(site: Site[Any]) -> Any:
    """A clamp alone: its bounds are in the output's range."""
    x = site.operand("self")
    return rescaled(site, x, x.value, site.required_output())


def _cat(site: Site[Any]) -> Any:
    output, items = site.required_output(), site.arguments["tensors"]
    if not all(isinstance(item, Operand) and item.run_time is None for item in items):
        raise Declined("not every input is integers")
    parts = [rescaled(site, item, item.value, output) for item in items]
    return site.call(site.target, parts, site.arguments["dim"])


_MOVES = one_of(RESHAPE, PERMUTE, UNSQUEEZE, SQUEEZE, SLICE, SELECT)

REQUANTIZE = IntegerForm(name="requantize", operators=(), write=_clamp)
"""A dequantize that a quantize follows."""

ARITHMETIC_FORMS = (
    IntegerForm(name="add", operators=ADD, write=_add),
    IntegerForm(name="sub", operators=SUB, write=_subtract),
    IntegerForm(name="max_pool2d", operators=MAX_POOL2D, write=_max_pool),
    IntegerForm(name="average", operators=MEAN, write=_mean),
    IntegerForm(name="global average", operators=ADAPTIVE_AVG_POOL2D, write=_global_average),
    IntegerForm(name="move", operators=_MOVES, write=_move),
    IntegerForm(name="clamp", operators=one_of(RELU, HARDTANH, CLAMP), write=_clamp),
    IntegerForm(name="cat", operators=CAT, write=_cat),
)
"""Operators without weights."""

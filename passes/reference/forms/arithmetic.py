"""Forms of sums, products and quotients of two tensors."""

import math
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from pt2e_quant.core.integer_ops.calls import cast, out_dtype, widen
from pt2e_quant.core.integer_ops.products import Quotient
from pt2e_quant.core.integer_ops.profiles import Addition, Quantization
from pt2e_quant.core.integer_ops.quantize import dequantize, quantize
from pt2e_quant.core.integer_ops.requantize import (
    OutputRange,
    factor_of,
    output_range,
    requantize,
)
from pt2e_quant.core.integer_ops.sums import add, add_by_ratios, common_shift
from pt2e_quant.core.qparams import QParams
from pt2e_quant.core.qparams import quantize as quantize_values
from pt2e_quant.graph.ops import ADD, DIV, MUL, SUB, aten
from pt2e_quant.passes.reference.forms.functions import looked_up, sigmoid_of, table
from pt2e_quant.passes.reference.forms.moves import rescaled
from pt2e_quant.passes.reference.forms.site import (
    Declined,
    IntegerForm,
    Operand,
    Output,
    Site,
    is_boolean,
)

_INT32 = (1 << 31) - 1


def _add(site: Site[Any]) -> Any:
    return _sum(site, site.arguments["alpha"])


def _subtract(site: Site[Any]) -> Any:
    return _sum(site, -site.arguments["alpha"])


def _sum(site: Site[Any], alpha: float) -> Any:
    """The sum x + alpha * y by the profile's arithmetic."""
    if _is_of_one_tensor(site):
        return table(site)
    x, y = _pair(site)
    if max(x.storage.itemsize, y.storage.itemsize) > 2:
        raise Declined("summands are wider than 16 bits")
    scale = site.required_output().qparams.scale
    zero_points = x.qparams.zero_point_int, y.qparams.zero_point_int
    match site.arithmetic.profile.addition:
        case Addition.RESCALED:
            return _sum_of_rescaled(site, x, y, alpha)
        case Addition.FLOAT_RATIOS if abs(alpha) == 1 and _are_bytes(x, y):
            return _sum_by_ratios(site, x, y, alpha)
        case Addition.REAL | Addition.FLOAT_RATIOS:
            return _sum_of_reals(site, x, y, alpha)
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


def _are_bytes(*operands: Operand[Any]) -> bool:
    return all(operand.storage.itemsize == 1 for operand in operands)


def _sum_by_ratios(site: Site[Any], x: Operand[Any], y: Operand[Any], alpha: float) -> Any:
    """As ONNX Runtime has it, which exchanges the two where x is one number for a row of y's."""
    output = site.required_output()
    pairs = [(x, 1.0), (y, alpha)]
    if _is_constant_inside(x, y):
        pairs.reverse()
    first, second = (sign * float(v.qparams.scale / output.qparams.scale) for v, sign in pairs)
    (left, _), (right, _) = pairs
    return add_by_ratios(
        site.call,
        left.value,
        right.value,
        (first, second),
        output.range,
        zero_points=(left.qparams.zero_point_int, right.qparams.zero_point_int),
        storages=(left.storage, right.storage),
    )


def _is_constant_inside(x: Operand[Any], y: Operand[Any]) -> bool:
    """True if x alone has size 1 in the innermost dimension that is not 1 in both."""
    pairs = zip_longest(reversed(x.like.shape), reversed(y.like.shape), fillvalue=1)
    sizes = [tuple(isinstance(size, int) and size == 1 for size in pair) for pair in pairs]
    return next((pair == (True, False) for pair in sizes if pair != (True, True)), False)


def _sum_of_reals(site: Site[Any], x: Operand[Any], y: Operand[Any], alpha: float) -> Any:
    """Both dequantized, added in float32, quantized."""
    real = [
        dequantize(site.call, v.value, v.qparams.scale_float, v.qparams.zero_point_int)
        for v in (x, y)
    ]
    total = site.call(aten.add.Tensor, *real, alpha=alpha)
    output = site.required_output()
    out = output.range
    by, scale = site.arithmetic.profile.quantization, output.qparams.scale_float
    return quantize(
        site.call,
        total,
        scale if by is Quantization.DIVIDED else 1.0 / scale,
        out.zero_point,
        limits=(out.low, out.high),
        storage=out.storage,
        by=by,
    )


def _multiply(site: Site[Any]) -> Any:
    """The product of both differences, then one factor of both scales."""
    if _is_of_one_tensor(site):
        return table(site)
    if is_boolean(site.arguments["other"]):
        return _where_true(site, site.arguments["other"])
    return _product(site, *_pair(site))


def _where_true(site: Site[Any], gate: Any) -> Any:
    """A product with booleans: the integers at the output's scale, and 0.0 where they are false."""
    x, output = site.operand("self"), site.required_output()
    kept, out = rescaled(site, x, x.value, output), output.range
    nothing = min(max(out.zero_point, out.low), out.high)
    zero = site.call(aten.full_like.default, kept, nothing)
    return site.call(aten.where.self, gate, kept, zero)


def _product(site: Site[Any], x: Operand[Any], y: Operand[Any]) -> Any:
    site.required_output()
    is_narrow = x.storage.itemsize + y.storage.itemsize <= 3  # 9 and 17 bits, or fewer
    dtype = torch.int32 if is_narrow else torch.int64
    call = site.call
    left, right = (widen(call, v.value, v.qparams.zero_point_int, v.storage) for v in (x, y))
    if x.storage.itemsize != y.storage.itemsize:  # out_dtype promotes nothing
        left, right = (cast(call, v, torch.int32) for v in (left, right))
    total = call(out_dtype, aten.mul.Tensor, dtype, left, right)
    scales = x.qparams.scale, y.qparams.scale
    kind = site.arithmetic.profile.multiplication
    return site.requantized(total, scales, reach=x.reach * y.reach, kind=kind)


def _gate(site: Site[Any]) -> Any:
    """glu: the first half times the sigmoid of the second, which a table gives in 16 bits."""
    x, dim = site.operand("self"), site.arguments["dim"]
    half = site.like.shape[dim]
    if not isinstance(half, int):
        raise Declined("it splits a dynamic dimension")
    first, second = (
        replace(
            x,
            value=site.call(aten.slice.Tensor, x.value, dim, start, start + half),
            like=x.like.narrow(dim, start, half),
        )
        for start in (0, half)
    )
    low, high = -(1 << 15), (1 << 15) - 1
    qparams = QParams.per_tensor(1.0 / (high - low), low, low, high, torch.int16)
    gate = Output(qparams=qparams, range=output_range(qparams, torch.int16))
    steps = looked_up(site, second, sigmoid_of(site), gate)
    like = first.like.to(torch.int16)
    return _product(site, first, Operand(value=steps, like=like, qparams=qparams))


def _divide(site: Site[Any]) -> Any:
    """The quotient of both differences, times one factor of the scales, rounded once."""
    if _is_of_one_tensor(site):
        return table(site)
    x, y = _pair(site)
    if max(x.storage.itemsize, y.storage.itemsize) > 2:
        raise Declined("its operands are wider than 16 bits")
    output = site.required_output()
    ratio = x.qparams.scale_float / (y.qparams.scale_float * output.qparams.scale_float)
    factor = common_shift(ratio, 0.0)
    if factor is None:
        raise Declined("its input's scale is far above those of its divisor and output")
    left, right = (widen(site.call, v.value, v.qparams.zero_point_int, v.storage) for v in (x, y))
    out = output.range
    limits = out.zero_point, out.low, out.high, out.storage
    return site.call(Quotient, left, right, factor.first, factor.shift, *limits)


def _is_of_one_tensor(site: Site[Any]) -> bool:
    """True if one of two arguments is a number, so that the other alone is mapped."""
    return any(isinstance(site.arguments[name], (int, float)) for name in ("self", "other"))


def _pair(site: Site[Any]) -> tuple[Operand[Any], Operand[Any]]:
    """Both arguments in integers; a float constant becomes 16 bits of its own range."""
    x, y = (_operand_or_constant(site, name) for name in ("self", "other"))
    return x, y


def _operand_or_constant(site: Site[Any], name: str) -> Operand[Any]:
    value = site.arguments[name]
    if not isinstance(value, torch.Tensor):
        return site.operand(name)
    real = value.detach().float()
    greatest = float(real.abs().max()) if real.numel() else 0.0
    if not math.isfinite(greatest):
        raise Declined(f'its constant "{name}" is not finite')
    qparams = QParams.per_tensor(max(greatest, 1e-30) / 32767, 0, -32768, 32767, torch.int16)
    integers = quantize_values(real, qparams)
    held = site.hold(integers, f"{name}_q")
    return Operand(value=held, like=integers, qparams=qparams, is_constant=True)


ARITHMETIC_FORMS = (
    IntegerForm(name="add", operators=ADD, write=_add),
    IntegerForm(name="sub", operators=SUB, write=_subtract),
    IntegerForm(name="mul", operators=MUL, write=_multiply),
    IntegerForm(name="div", operators=DIV, write=_divide),
    IntegerForm(name="glu", operators=(aten.glu.default,), write=_gate),
)
"""Sums, products and quotients of two tensors."""

"""Forms of comparisons and of places of extremes: integers in, booleans or places out."""

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.integer_ops.sums import common_shift
from pt2e_quant.core.qparams import dequantize
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pattern import one_of
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Site


class _Order(StrEnum):
    """The kinds of comparison."""

    GREATER = "gt"
    GREATER_EQUAL = "ge"
    LESS = "lt"
    LESS_EQUAL = "le"
    EQUAL = "eq"
    NOT_EQUAL = "ne"


_MIRRORED = {
    _Order.GREATER: _Order.LESS,
    _Order.GREATER_EQUAL: _Order.LESS_EQUAL,
    _Order.LESS: _Order.GREATER,
    _Order.LESS_EQUAL: _Order.GREATER_EQUAL,
    _Order.EQUAL: _Order.EQUAL,
    _Order.NOT_EQUAL: _Order.NOT_EQUAL,
}
"""The comparison with its two sides exchanged."""


def _overloads(packet: Any) -> Mapping[str, Any]:
    return {name: getattr(packet, name) for name in ("Tensor", "Scalar")}


_BY_TARGET = {
    target: order for order in _Order for target in _overloads(getattr(aten, order.value)).values()
}
COMPARISONS = tuple(_BY_TARGET)
"""gt, ge, lt, le, eq and ne, with a tensor and with a number."""

EXTREME_PLACES = (aten.argmax.default, aten.argmin.default)


def _compare(site: Site[Any]) -> Any:
    order = _BY_TARGET[site.target]
    first, second = (site.arguments[name] for name in ("self", "other"))
    if isinstance(first, Operand) and isinstance(second, Operand):
        return _of_two(site, order, site.operand("self"), site.operand("other"))
    if isinstance(first, Operand):
        return _with_constant(site, order, site.operand("self"), second)
    return _with_constant(site, _MIRRORED[order], site.operand("other"), first)


def _with_constant(site: Site[Any], order: _Order, x: Operand[Any], bound: Any) -> Any:
    """A comparison of the integers with the first that is at least, or above, each number.

    The same booleans as in float, since real values grow with their integers.
    """
    if not isinstance(bound, (int, float, Tensor)):
        raise Declined("it compares with a float value that is computed at run time")
    numbers = torch.as_tensor(bound).detach().float()
    _refuse_wide(x)
    if bool(numbers.isnan().any()):
        raise Declined("it compares with NaN")
    limits = torch.iinfo(x.storage)
    integers = torch.arange(limits.min, limits.max + 1).to(x.storage)
    real = dequantize(integers, x.qparams).contiguous()
    # How many real values are below each number, and how many are not above it.
    below = torch.searchsorted(real, numbers.contiguous()) + limits.min
    upto = torch.searchsorted(real, numbers.contiguous(), right=True) + limits.min
    match order:
        case _Order.GREATER | _Order.LESS_EQUAL:
            target, places = (aten.ge if order is _Order.GREATER else aten.lt), upto
        case _Order.GREATER_EQUAL | _Order.LESS:
            target, places = (aten.ge if order is _Order.GREATER_EQUAL else aten.lt), below
        case _:
            nowhere = limits.max + 1
            target = aten.eq if order is _Order.EQUAL else aten.ne
            places = torch.where(upto > below, below, nowhere)
    wide = cast(site.call, x.value, torch.int32)
    if places.dim() == 0:
        return site.call(target.Scalar, wide, int(places))
    return site.call(target.Tensor, wide, site.hold(places.to(torch.int32), "bound"))


def _refuse_wide(*operands: Operand[Any]) -> None:
    if any(operand.storage.itemsize > 2 for operand in operands):
        raise Declined("its inputs are wider than 16 bits")
    if any(operand.qparams.scale.numel() > 1 for operand in operands):
        raise Declined("its inputs have a scale for each channel")


def _of_two(site: Site[Any], order: _Order, x: Operand[Any], y: Operand[Any]) -> Any:
    """Both in steps of one scale: exact where theirs is the same, else with factors of 31 bits."""
    _refuse_wide(x, y)
    left, right = (
        cast(site.call, widen(site.call, v.value, v.qparams.zero_point_int, v.storage), torch.int64)
        for v in (x, y)
    )
    first, second = x.qparams.scale_float, y.qparams.scale_float
    if first != second:
        # Relative to the greater one, whose factor is a power of 2.
        _, exponent = math.frexp(max(first, second))
        factors = common_shift(math.ldexp(first, -exponent), math.ldexp(second, -exponent))
        assert factors is not None  # both are below 1
        left = site.call(aten.mul.Tensor, left, factors.first)
        right = site.call(aten.mul.Tensor, right, factors.second)
    return site.call(getattr(aten, order.value).Tensor, left, right)


def _place_of_extreme(site: Site[Any]) -> Any:
    """The place of the greatest or least integer, which is that of the real value."""
    x = site.operand("self")
    _refuse_wide(x)
    return site.call(site.target, x.value, site.arguments["dim"], site.arguments["keepdim"])


COMPARISON_FORMS = (
    IntegerForm(name="comparison", operators=COMPARISONS, write=_compare, is_for_float=True),
    IntegerForm(
        name="place of an extreme",
        operators=one_of(EXTREME_PLACES),
        write=_place_of_extreme,
        is_for_float=True,
    ),
)
"""Operators whose result is not quantized, since it is no real number."""

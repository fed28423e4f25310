"""Forms of what only moves, clamps or chooses integers."""

import math
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import cast, widen
from pt2e_quant.core.qparams import QParams, quantize
from pt2e_quant.graph.ops import (
    CAT,
    CLAMP,
    EXPAND,
    HARDTANH,
    IDENTITIES,
    MASKED_FILL,
    MAXIMUM,
    MINIMUM,
    PAD,
    PERMUTE,
    RELU,
    RELU6,
    RESHAPE,
    RESIZE_NEAREST,
    SELECT,
    SLICE,
    SQUEEZE,
    STACK,
    UNSQUEEZE,
    aten,
    out_of_place,
)
from pt2e_quant.graph.pattern import one_of
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Output, Site


def _is_same(a: QParams, b: QParams) -> bool:
    return (
        a.scale_float == b.scale_float
        and a.zero_point_int == b.zero_point_int
        and (a.quant_min, a.quant_max, a.dtype) == (b.quant_min, b.quant_max, b.dtype)
    )


def is_same_scale(x: Operand[Any], output: Output) -> bool:
    """True if integers of x mean the same as integers of the output."""
    return _is_same(x.qparams, output.qparams)


def rescaled(site: Site[Any], x: Operand[Any], integers: Any, output: Output) -> Any:
    """Integers of x's scale in the output's; untouched where both are the same."""
    out = output.range
    if is_same_scale(x, output):
        limits = output.qparams.quant_min, output.qparams.quant_max
        if (out.low, out.high) == limits:
            return integers
        return site.call(aten.clamp.default, integers, out.low, out.high)
    wide = widen(site.call, integers, x.qparams.zero_point_int, x.storage)
    return site.requantized(wide, (x.qparams.scale,), output=output)


def _move(site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    # Of another quantized tensor (expand_as, view_as) it reads the shape, which its integers have.
    rest = {
        name: value.value if isinstance(value, Operand) else value
        for name, value in site.arguments.items()
        if name != "self"
    }
    # The float twin moved a copy: what dequantize gives, not the integers that others read too.
    target = out_of_place(site.target) or site.target
    return rescaled(site, x, site.call(target, x.value, **rest), output)


def _clamp(site: Site[Any]) -> Any:
    """A clamp alone: its bounds are in the output's range."""
    x = site.operand("self")
    return rescaled(site, x, x.value, site.required_output())


def _join(site: Site[Any]) -> Any:
    output, items = site.required_output(), site.arguments["tensors"]
    parts = [_part(site, item, output) for item in items]
    return site.call(site.target, parts, site.arguments["dim"])


def _part(site: Site[Any], item: Any, output: Output) -> Any:
    """Integers of the output's scale; a float constant is quantized to them."""
    if isinstance(item, Tensor):
        return site.hold(quantize(item.detach().float(), output.qparams), "part_q")
    if not isinstance(item, Operand) or item.run_time is not None:
        raise Declined("not every input is integers")
    return rescaled(site, item, item.value, output)


def _choose(site: Site[Any]) -> Any:
    """maximum, minimum: of integers of the output's scale."""
    output = site.required_output()
    x, y = (rescaled(site, v, v.value, output) for v in map(site.operand, ("self", "other")))
    return site.call(site.target, x, y)


def _where(site: Site[Any]) -> Any:
    """Integers of the output's scale, chosen by booleans; numbers and constants are quantized."""
    output = site.required_output()
    x, y = (_chosen(site, site.arguments[name], name, output) for name in ("self", "other"))
    return site.call(aten.where.self, site.arguments["condition"], x, y)


def _chosen(site: Site[Any], value: Any, name: str, output: Output) -> Any:
    if isinstance(value, (int, float)):
        value = torch.tensor(float(value))
    if isinstance(value, Tensor):
        return site.hold(quantize(value.detach().float(), output.qparams), f"{name}_q")
    x = site.operand(name)
    return rescaled(site, x, x.value, output)


def _masked_fill(site: Site[Any]) -> Any:
    x, output = site.operand("self"), site.required_output()
    value = site.arguments["value"]
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        raise Declined("it fills with a number that is computed at run time")
    filler = _quantized(float(value), output)
    integers = rescaled(site, x, x.value, output)
    return site.call(aten.masked_fill.Scalar, integers, site.arguments["mask"], filler)


def _quantized(real: float, output: Output) -> int:
    limit = 3.0e38
    value = torch.tensor([min(max(real, -limit), limit)])
    return int(quantize(value, output.qparams).clamp(output.range.low, output.range.high).item())


def _pad(site: Site[Any]) -> Any:
    x, output, given = site.operand("self"), site.required_output(), site.arguments
    if given.get("mode", "constant") != "constant":
        return _gather(site)
    filler = _quantized(float(given["value"] or 0.0), output)
    integers = rescaled(site, x, x.value, output)
    return site.call(aten.constant_pad_nd.default, integers, given["pad"], filler)


def _fill(site: Site[Any]) -> Any:
    """Zeros of a size that is known at run time, as the first state of a recurrent layer."""
    output, given = site.required_output(), site.arguments
    filler = _quantized(0.0, output)
    options = {"dtype": output.range.storage, "device": given["device"]}
    return site.call(aten.full.default, given["size"], filler, **options)


def _booleans(site: Site[Any]) -> Any:
    """The integers of 1.0 and 0.0."""
    output = site.required_output()
    true, false = _quantized(1.0, output), _quantized(0.0, output)
    chosen = site.call(aten.where.Scalar, site.arguments["self"], true, false)
    return cast(site.call, chosen, output.range.storage)


def _integers(site: Site[Any]) -> Any:
    """Whole numbers as they are, in the output's scale."""
    whole = cast(site.call, site.arguments["self"], torch.int64)
    held = site.call(aten.clamp.default, whole, -_EXACT, _EXACT)
    return site.requantized(held, (torch.ones(1),))


def _gather(site: Site[Any]) -> Any:
    """A move of the values of each channel that torch has no integer kernel for, by indices."""
    x, output = (
        site.operand("input" if "input" in site.arguments else "self"),
        site.required_output(),
    )
    rank = len(site.arguments["pad"]) // 2 if "pad" in site.arguments else x.like.dim() - 2
    spatial, after = x.like.shape[-rank:], site.like.shape[-rank:]
    if not all(isinstance(size, int) for size in (*spatial, *after)):
        raise Declined("it moves values along a dynamic dimension")
    if math.prod(spatial) > _EXACT:
        raise Declined("float32 does not count its places")
    # In the float type of the operator itself, whose rounding decides what is nearest.
    places = torch.arange(math.prod(spatial), dtype=torch.float32)
    places = places.reshape(*[1] * (x.like.dim() - rank), *spatial)
    arguments = {
        name: places if isinstance(value, Operand) else value
        for name, value in site.arguments.items()
    }
    index = site.hold(site.target(**arguments).flatten().to(torch.int64), "places")
    flat = site.call(aten.flatten.using_ints, x.value, -rank)
    moved = site.call(aten.index_select.default, flat, -1, index)
    return rescaled(site, x, site.call(aten.unflatten.int, moved, -1, list(after)), output)


CLAMPS = one_of(RELU, RELU6, HARDTANH, CLAMP)
"""Operators that bound the integers of the one that they follow."""

_MOVES = one_of(
    RESHAPE,
    PERMUTE,
    UNSQUEEZE,
    SQUEEZE,
    SLICE,
    SELECT,
    EXPAND,
    IDENTITIES,
    (
        aten.flip.default,
        aten.repeat.default,
        aten.tile.default,
        aten.index_select.default,
        aten.index.Tensor,
        aten.gather.default,
        aten.amax.default,
        aten.amin.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.channel_shuffle.default,
        aten.roll.default,
        aten.repeat_interleave.self_int,
        aten.diagonal.default,
        aten.unfold.default,
        aten.rot90.default,
    ),
)
_EXACT = 1 << 24
"""Every integer up to here is a float32."""

ZEROS = (aten.zeros.default,)
"""Operators that read no tensor."""

_WHERE = (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf)

REQUANTIZE = IntegerForm(name="requantize", operators=(), write=_clamp)
"""A dequantize that a quantize follows."""

BOOLEANS = IntegerForm(name="booleans", operators=(), write=_booleans)
"""A cast of booleans that a quantize follows."""

INTEGERS = IntegerForm(name="integers", operators=(), write=_integers)
"""A cast of integers that a quantize follows."""

MOVE_FORMS = (
    IntegerForm(name="move", operators=_MOVES, write=_move),
    IntegerForm(name="clamp", operators=CLAMPS, write=_clamp),
    IntegerForm(name="join", operators=one_of(CAT, STACK), write=_join),
    IntegerForm(name="choose", operators=one_of(MAXIMUM, MINIMUM), write=_choose),
    IntegerForm(name="where", operators=_WHERE, write=_where),
    IntegerForm(name="masked_fill", operators=MASKED_FILL, write=_masked_fill),
    IntegerForm(name="pad", operators=PAD, write=_pad),
    IntegerForm(name="nearest", operators=RESIZE_NEAREST, write=_gather),
    IntegerForm(name="fill", operators=ZEROS, write=_fill),
)
"""Operators that move integers, or choose among them."""

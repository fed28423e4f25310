"""Forms of functions and norms: tables for maps of one integer, prelu, all norms."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2e_quant.core.integer_ops.calls import WIDE, widen
from pt2e_quant.core.integer_ops.norms import (
    Affine,
    Norm,
    affine_factors,
    norm_factors,
)
from pt2e_quant.core.integer_ops.profiles import Functions
from pt2e_quant.core.integer_ops.tables import (
    Interpolate,
    LookUp,
    interpolated_table,
    leaky_table,
    logistic,
    silu,
    table_of,
    tanh,
)
from pt2e_quant.core.qparams import dequantize, quantize
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM, RmsNorm
from pt2e_quant.graph.ops import (
    ELU,
    GROUP_NORM,
    HARDSIGMOID,
    HARDSWISH,
    INSTANCE_NORM,
    LAYER_NORM,
    LEAKY_RELU,
    PRELU,
    SIGMOID,
    SILU,
    TANH,
    aten,
    parameters,
)
from pt2e_quant.passes.reference.forms.site import (
    Declined,
    IntegerForm,
    Operand,
    Output,
    Site,
)

_MLAS: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(SIGMOID, logistic),
    **dict.fromkeys(SILU, silu),
    **dict.fromkeys(TANH, tanh),
}


_UNTAGGED = frozenset((*ELU, *HARDSIGMOID, *LEAKY_RELU))
"""Operators that torch 2.11 does not tag as pointwise; later ones do."""


def is_pointwise(target: Any) -> bool:
    """True if an operator computes each value from the values at its place."""
    if not isinstance(target, OpOverload):
        return False
    return torch.Tag.pointwise in target.tags or target in _UNTAGGED


def table(site: Site[Any]) -> Any:
    """Any function of one quantized tensor and of numbers.

    Of 8 bits it is a table of 256 entries that gives what the q/dq graph gives. Of 16 bits it is
    a line between neighbours of 513 entries; the greatest error is in the note.
    """
    names = [name for name, value in site.arguments.items() if isinstance(value, Operand)]
    others = [value for name, value in site.arguments.items() if name not in names]
    if len(names) != 1 or not all(_is_number(value) for value in others):
        raise Declined("it is a function of more than one tensor")
    x, output = site.operand(names[0]), site.required_output()
    is_byte = max(x.storage.itemsize, output.range.storage.itemsize) == 1
    is_own = site.arithmetic.profile.functions is Functions.XNNPACK and site.target in LEAKY_RELU
    if is_byte and is_own:
        slope = float(site.arguments["negative_slope"])
        entries = leaky_table(slope, x.qparams, output.qparams, output.range)
        return site.call(LookUp, x.value, site.hold(entries, "table"), torch.iinfo(x.storage).min)
    return looked_up(site, x, _function(site, names[0]), output)


def looked_up(
    site: Site[Any], x: Operand[Any], function: Callable[[Tensor], Tensor], output: Output
) -> Any:
    """A function of each value of x by a table, in integers of an output's scale."""
    if x.storage.itemsize > 2:
        raise Declined("its input is wider than 16 bits")
    out, low = output.range, torch.iinfo(x.storage).min
    if x.storage.itemsize == 1:
        by = site.arithmetic.profile.quantization
        entries = table_of(function, x.qparams, output.qparams, out, by)
        return site.call(LookUp, x.value, site.hold(entries, "table"), low)
    entries = interpolated_table(function, x.qparams, output.qparams)
    limits = out.zero_point, out.low, out.high, out.storage
    _state_error(site, function, x, entries, output)
    return site.call(Interpolate, x.value, site.hold(entries, "table"), low, *limits)


def sigmoid_of(site: Site[Any]) -> Callable[[Tensor], Tensor]:
    """The sigmoid as the profile computes it."""
    return logistic if site.arithmetic.profile.functions is Functions.MLAS else torch.sigmoid


def _function(site: Site[Any], name: str) -> Callable[[Tensor], Tensor]:
    """The site's operator as a function of one argument, as the profile computes it."""
    if site.arithmetic.profile.functions is Functions.MLAS and site.target in _MLAS:
        return _MLAS[site.target]

    def function(real: Tensor) -> Tensor:
        result: Tensor = site.target(**_by_schema(site.target, {**site.arguments, name: real}))
        return result

    return function


def _is_number(value: Any) -> bool:
    return not isinstance(value, (Operand, Tensor)) and not hasattr(value, "meta")


def _by_schema(target: OpOverload, arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = {p.name for p in parameters(target)}
    return {name: value for name, value in arguments.items() if name in given}


def _state_error(
    site: Site[Any], function: Any, x: Operand[Any], entries: Tensor, output: Output
) -> None:
    limits = torch.iinfo(x.storage)
    every = torch.arange(limits.min, limits.max + 1).to(x.storage)
    out = output.range
    found = Interpolate(every, entries, limits.min, out.zero_point, out.low, out.high, out.storage)
    real = function(dequantize(every, x.qparams)).nan_to_num(0.0)
    expected = quantize(real, output.qparams).clamp(out.low, out.high)
    used = (every >= x.qparams.quant_min) & (every <= x.qparams.quant_max)
    error = ((found.long() - expected.long()).abs() * used).max()
    site.remarks.append(f"a table of 513 entries, at most {int(error)} steps from the function")


def _prelu(site: Site[Any]) -> Any:
    """A table for one slope; slopes of channels are factors of the negative values."""
    x, output, weight = site.operand("self"), site.required_output(), site.arguments["weight"]
    if not isinstance(weight, Tensor):
        raise Declined("its weight is no float constant of this graph")
    slopes = weight.detach().float().flatten()
    if slopes.numel() == 1:
        return looked_up(site, x, lambda real: torch.prelu(real, slopes.to(real.dtype)), output)
    per_channel = slopes.reshape(-1, *[1] * (x.like.dim() - 2))
    steps = widen(site.call, x.value, x.qparams.zero_point_int, x.storage)
    mirrored = steps
    if bool((slopes < 0).any()):  # a factor has no sign
        signs = torch.where(per_channel < 0, -1, 1).to(WIDE[x.storage.itemsize])
        mirrored = site.call(aten.mul.Tensor, steps, site.hold(signs, "signs"))
    kept = site.requantized(steps, (x.qparams.scale,))
    scaled = site.requantized(mirrored, (x.qparams.scale, per_channel.abs()))
    is_kept = site.call(aten.ge.Scalar, steps, 0)
    return site.call(aten.where.self, is_kept, kept, scaled)


TABLE = IntegerForm(name="table", operators=HARDSWISH, write=table)
"""Pointwise functions of one tensor, whatever their operator."""


def _layer_norm(site: Site[Any]) -> Any:
    count = len(site.arguments["normalized_shape"])
    dims = list(range(-count, 0))
    return _norm(site, dims, site.arguments["weight"], site.arguments["bias"], is_centred=True)


def _rms_norm(site: Site[Any]) -> Any:
    given = site.arguments
    if "normalized_shape" in given:
        dims = list(range(-len(given["normalized_shape"]), 0))
    else:
        dims = list(given["dims"])
    return _norm(site, dims, given.get("weight"), None, is_centred=False)


def _norm(site: Site[Any], dims: list[int], weight: Any, bias: Any, *, is_centred: bool) -> Any:
    x = site.operand("input" if "input" in site.arguments else "x")
    return _normalized(site, x, x.value, x.like.shape, dims, weight, bias, is_centred=is_centred)


def _group_norm(site: Site[Any]) -> Any:
    """The groups of a group norm as one more dimension."""
    x, groups = site.operand("input"), site.arguments["num_groups"]
    N, C, *spatial = x.like.shape
    if not isinstance(C, int):
        raise Declined("it normalises a dynamic dimension")
    shape = [N, groups, C // groups, *spatial]
    per_channel = [1, groups, C // groups, *[1] * len(spatial)]
    weight, bias = (
        v.reshape(per_channel) if isinstance(v, Tensor) else v
        for v in (site.arguments["weight"], site.arguments["bias"])
    )
    grouped = site.call(aten.unflatten.int, x.value, 1, [groups, C // groups])
    dims = list(range(2 - len(shape), 0))
    made = _normalized(site, x, grouped, shape, dims, weight, bias, is_centred=True)
    return site.call(aten.flatten.using_ints, made, 1, 2)


def _normalized(
    site: Site[Any],
    x: Operand[Any],
    value: Any,
    shape: Any,
    dims: list[int],
    weight: Any,
    bias: Any,
    *,
    is_centred: bool,
) -> Any:
    output = site.required_output()
    sizes = [shape[d] for d in dims]
    if not all(isinstance(size, int) for size in sizes):
        raise Declined("it normalises a dynamic dimension")
    for given in (weight, bias):
        if given is not None and not isinstance(given, Tensor):
            raise Declined("its weight or bias is no float constant of this graph")
    eps = site.arguments.get("eps")
    factors = norm_factors(
        torch.ones(1, dtype=torch.float64) if weight is None else weight.detach().double(),
        torch.zeros(1, dtype=torch.float64) if bias is None else bias.detach().double(),
        count=math.prod(sizes),
        reach=x.reach,
        input_scale=x.qparams.scale_float,
        output_scale=output.qparams.scale_float,
        eps=torch.finfo(torch.float32).eps if eps is None else float(eps),
        is_centred=is_centred,
    )
    if factors is None:
        raise Declined("its scales, eps and length are out of reach of 64-bit integers")
    out = output.range
    return site.call(
        Norm,
        value,
        site.hold(factors.gain, "gain"),
        site.hold(factors.offset, "offset"),
        dims,
        None if is_centred else x.qparams.zero_point_int,
        [factors.centred_shift, factors.root_shift, factors.fraction],
        factors.epsilon,
        out.zero_point,
        out.low,
        out.high,
        out.storage,
    )


def _instance_norm(site: Site[Any]) -> Any:
    """Each channel of each image by its own statistics, or by running ones."""
    if not site.arguments["use_input_stats"]:
        return _by_running_statistics(site)
    x = site.operand("input")
    rank = x.like.dim() - 2
    weight, bias = (
        v.reshape(-1, *[1] * rank) if isinstance(v, Tensor) else v
        for v in (site.arguments["weight"], site.arguments["bias"])
    )
    dims = list(range(-rank, 0))
    return _normalized(site, x, x.value, x.like.shape, dims, weight, bias, is_centred=True)


def _batch_norm(site: Site[Any]) -> Any:
    if site.arguments["training"]:
        raise Declined("it normalises by statistics of the batch")
    return _by_running_statistics(site)


def _by_running_statistics(site: Site[Any]) -> Any:
    """A factor and an offset for each channel, rounded once."""
    x, output, given = site.operand("input"), site.required_output(), site.arguments
    parts = [given[name] for name in ("weight", "bias", "running_mean", "running_var")]
    if any(part is not None and not isinstance(part, Tensor) for part in parts):
        raise Declined("its weight, bias or statistics are no float constants of this graph")
    weight, bias, mean, var = (v if v is None else v.detach().double() for v in parts)
    if mean is None or var is None:
        raise Declined("it has no running statistics")
    scale = torch.rsqrt(var + given["eps"]) * (1.0 if weight is None else weight)
    shift = (0.0 if bias is None else bias) - mean * scale
    factors = affine_factors(
        scale,
        shift,
        reach=x.reach,
        input_scale=x.qparams.scale_float,
        output_scale=output.qparams.scale_float,
    )
    if factors is None:
        raise Declined("its factors and offsets are out of reach of 64-bit integers")
    channels = (-1, *[1] * (x.like.dim() - 2))
    out = output.range
    return site.call(
        Affine,
        x.value,
        site.hold(factors.gain.reshape(channels), "gain"),
        site.hold(factors.offset.reshape(channels), "offset"),
        x.qparams.zero_point_int,
        factors.fraction,
        out.zero_point,
        out.low,
        out.high,
        out.storage,
    )


FUNCTION_FORMS = (
    TABLE,
    IntegerForm(
        name="function", operators=(aten.log_sigmoid.default, aten.gelu_.default), write=table
    ),
    IntegerForm(name="prelu", operators=PRELU, write=_prelu),
    IntegerForm(name="layer norm", operators=LAYER_NORM[:1], write=_layer_norm),
    IntegerForm(name="group norm", operators=GROUP_NORM, write=_group_norm),
    IntegerForm(name="instance norm", operators=INSTANCE_NORM, write=_instance_norm),
    IntegerForm(name="RMS norm", operators=(*RMS_NORM, RmsNorm), write=_rms_norm),
    IntegerForm(name="batch norm", operators=(aten.batch_norm.default,), write=_batch_norm),
)
"""Functions of a tensor, and norms."""

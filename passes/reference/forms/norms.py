"""Forms of norms: by statistics of what they read, and by running ones."""

import math
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.norms import Affine, Norm, affine_factors, norm_factors
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM, RmsNorm
from pt2e_quant.graph.ops import GROUP_NORM, INSTANCE_NORM, LAYER_NORM, aten
from pt2e_quant.passes.reference.forms.site import Declined, IntegerForm, Operand, Site


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


NORM_FORMS = (
    IntegerForm(name="layer norm", operators=LAYER_NORM[:1], write=_layer_norm),
    IntegerForm(name="group norm", operators=GROUP_NORM, write=_group_norm),
    IntegerForm(name="instance norm", operators=INSTANCE_NORM, write=_instance_norm),
    IntegerForm(name="RMS norm", operators=(*RMS_NORM, RmsNorm), write=_rms_norm),
    IntegerForm(name="batch norm", operators=(aten.batch_norm.default,), write=_batch_norm),
)
"""Norms."""

"""Scheme names read activations then weights: `int8_dynamic`, `w4_g128`, `a8w4_g32`, `a16w8`.

Those of small floats and code books are a table, `core.format_schemes`.
"""

import re
from dataclasses import replace

import torch

from pt2e_quant.core.errors import ConfigError, near
from pt2e_quant.core.formats.format_schemes import FORMAT_SCHEMES, format_scheme_named
from pt2e_quant.core.formats.scale_format import ScaleFormat
from pt2e_quant.core.granularity import Granularity, PerChannel, PerGroup, PerTensor, PerToken
from pt2e_quant.core.schemes import Scheme, TensorScheme

_NAME = re.compile(r"(?:a(?P<a>4|8|16))?w(?P<w>[2-8])(?:_g(?P<g>[1-9]\d*))?")
_WEIGHTS_FIRST = re.compile(r"w(?P<w>[2-8])a(?P<a>4|8|16)(?P<g>_g[1-9]\d*)?")
_DYNAMIC = re.compile(r"int8_dynamic(?P<tensor>_per_tensor)?")


def scheme_named(
    name: str,
    *,
    symmetric: bool = True,
    narrow: bool = False,
    scales: ScaleFormat | None = None,
) -> Scheme:
    """The scheme that a name says.

    `wB` is weight-only with B bits per output channel, `wB_gG` with a scale for each group of
    G; `a8wB…` adds activations quantized to int8 at run time, per token; `a16wB…` and `a4wB…` add
    static ones of 16 or 4 bits, per tensor; `int8_dynamic` is `a8w8`, and
    `int8_dynamic_per_tensor` the same with one activation scale per tensor. Names that read weights
    first are those of `activations_first`. The others are in `FORMAT_SCHEMES`.

    Args:
        name: for example "w4_g128" or "mxfp4".
        symmetric: integer weights have zero_point 0.
        narrow: symmetric integer weights leave out the least integer, as those of 8 bits do
            wherever activations are quantized.
        scales: how the scales of weights are kept; the name's own way if None.

    Raises:
        ConfigError: the name is none of these, or an option means nothing for it.

    >>> str(scheme_named("a8w4_g32").weight)
    'int4[-8, 7] symmetric PerGroup(group_size=32, axis=-1)'
    """
    name = activations_first(name)
    scheme = format_scheme_named(name)
    if scheme is None:
        scheme = _integer_scheme(name, symmetric=symmetric)
    elif not symmetric:
        raise ConfigError(f'"{name}" is symmetric', fix="leave symmetric=True")
    weight = scheme.weight
    assert weight is not None  # every named scheme quantizes weights
    if narrow:
        if weight.format is not None or not weight.symmetric:
            raise ConfigError(f'"{name}" has no narrow range: its weights are {weight}')
        weight = weight.narrowed()
    if scales is not None:
        weight = replace(weight, scales=scales)
    return replace(scheme, weight=weight)


def activations_first(name: str) -> str:
    """A name that reads weights first, as other libraries write it; any other as it is.

    There `a16` is the float16 that the model computes in: weights alone are quantized.

    >>> activations_first("w4a4"), activations_first("w4a8_g32"), activations_first("w4a16_g128")
    ('a4w4', 'a8w4_g32', 'w4_g128')
    """
    found = _WEIGHTS_FIRST.fullmatch(name)
    if found is None:
        return name
    activations = "" if found["a"] == "16" else f"a{found['a']}"
    return f"{activations}w{found['w']}{found['g'] or ''}"


def _integer_scheme(name: str, *, symmetric: bool) -> Scheme:
    if dynamic := _DYNAMIC.fullmatch(name):
        granularity: Granularity = PerTensor() if dynamic["tensor"] else PerToken()
        return Scheme(
            name=name,
            input=activation_scheme(8, granularity),
            output=None,
            weight=weight_scheme(8, symmetric=symmetric, by_integers=True),
        )
    found = _NAME.fullmatch(name)
    if found is None:
        raise ConfigError(
            f'there is no scheme "{name}"',
            fix='names are like "w4_g128", "a8w4_g32", "a16w8" and "int8_dynamic", or of the '
            f"table: {near(name, FORMAT_SCHEMES)}",
        )
    group_size = int(found["g"]) if found["g"] else None
    activation = None
    if found["a"] is not None:
        granularity = PerToken() if found["a"] == "8" else PerTensor()
        activation = activation_scheme(int(found["a"]), granularity)
    return Scheme(
        name=name,
        input=activation,
        output=activation if found["a"] in ("4", "16") else None,
        weight=weight_scheme(
            int(found["w"]), group_size, symmetric=symmetric, by_integers=activation is not None
        ),
    )


def activation_scheme(bits: int, granularity: Granularity) -> TensorScheme:
    """Activations: 8 bits are dynamic and affine, 4 static and affine, 16 static and symmetric.

    Four bits are the least 16 integers around 0 of int8: no q/dq operator takes int4 activations.
    """
    return TensorScheme(
        dtype=getattr(torch, f"int{max(bits, 8)}"),
        granularity=granularity,
        symmetric=bits == 16,
        quant_min=-8 if bits == 4 else None,
        quant_max=7 if bits == 4 else None,
        is_dynamic=bits == 8,
    )


def weight_scheme(
    bits: int,
    group_size: int | None = None,
    *,
    symmetric: bool = True,
    by_integers: bool = False,
) -> TensorScheme:
    """Weights of 2 to 8 bits, a scale per output channel or per group of a row.

    Args:
        bits: of a weight.
        group_size: how many neighbours in a row share a scale; None for one scale per row.
        symmetric: zero_point is 0.
        by_integers: activations are quantized too. Weights of 8 bits are -127 .. 127 then: kernels
            add pairs of products in 16 bits, which 2 * 128 * 128 does not fit.
    """
    dtype: torch.dtype = getattr(torch, f"int{bits}" if symmetric else f"uint{bits}")
    scheme = TensorScheme(
        dtype=dtype,
        granularity=PerChannel(axis=0) if group_size is None else PerGroup(group_size),
        symmetric=symmetric,
    )
    return scheme.narrowed() if by_integers and scheme.is_full_int8 else scheme

"""The schemes by name that affine integers cannot say: small floats, code books, MX, NVFP4.

One row a name. `fp8…` quantizes activations and weights, `…_weight_only`, `nf4…`, `lut…` and `w1…`
weights alone.
"""

import re
from dataclasses import replace
from types import MappingProxyType

import torch

from pt2e_quant.core.formats.number_formats import (
    BINARY,
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP8_E5M2,
    NF4,
    CodeBook,
    FloatFormat,
    NumberFormat,
)
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES, ScaleFormat
from pt2e_quant.core.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerTensor,
    PerToken,
)
from pt2e_quant.core.schemes import Scheme, TensorScheme

MX_BLOCK = 32
"""Elements that share a scale in MX, section 5.2 of the specification."""
NVFP4_BLOCK = 16
NF4_BLOCK = 64
"""QLoRA, section 4."""
DOUBLE_GROUP = 256
"""QLoRA, section 3."""

_ROWS = PerChannel(axis=0)
_E8M0 = ScaleFormat(dtype=torch.float8_e8m0fnu)
_NV = ScaleFormat(dtype=torch.float8_e4m3fn, in_tensor_units=True)
_TERNARY = TensorScheme(
    # By name: torch's type stubs do not list it.
    dtype=getattr(torch, "int2"),  # noqa: B009
    granularity=_ROWS,
    symmetric=True,
    quant_min=-1,
    quant_max=1,
)


def _tensor(
    form: NumberFormat,
    granularity: Granularity,
    *,
    is_dynamic: bool = False,
    scales: ScaleFormat = FLOAT32_SCALES,
) -> TensorScheme:
    return TensorScheme(
        dtype=form.code_dtype,
        granularity=granularity,
        symmetric=True,
        is_dynamic=is_dynamic,
        format=form,
        scales=scales,
    )


def _scheme(name: str, weight: TensorScheme, activation: TensorScheme | None = None) -> Scheme:
    return Scheme(name=name, input=activation, output=None, weight=weight)


def _fp8(name: str, form: FloatFormat) -> list[Scheme]:
    """The ways to scale float8: static or dynamic, by tensor, row, or blocks of 128."""
    rows, whole = _tensor(form, _ROWS), _tensor(form, PerTensor())
    tokens = _tensor(form, PerToken(), is_dynamic=True)
    runs = _tensor(form, PerBlock((1, 128)), is_dynamic=True)
    return [
        _scheme(name, rows, whole),
        _scheme(f"{name}_per_tensor", whole, whole),
        _scheme(f"{name}_dynamic", rows, tokens),
        _scheme(f"{name}_dynamic_per_tensor", whole, replace(whole, is_dynamic=True)),
        _scheme(f"{name}_blocks", _tensor(form, PerBlock((128, 128))), runs),
        _scheme(f"{name}_weight_only", rows),
    ]


def _blocks(name: str, form: FloatFormat, size: int, scales: ScaleFormat) -> list[Scheme]:
    """A block format: weights and dynamic activations in runs along the last axis, or weights."""
    weight = _tensor(form, PerGroup(size), scales=scales)
    return [
        _scheme(name, weight, replace(weight, is_dynamic=True)),
        _scheme(f"{name}_weight_only", weight),
    ]


def _look_up(bits: int) -> list[Scheme]:
    form = CodeBook(name=f"lut{bits}", bits=bits)
    return [
        _scheme(f"lut{bits}", _tensor(form, _ROWS)),
        _scheme(f"lut{bits}_per_tensor", _tensor(form, PerTensor())),
    ]


_ALL = (
    *_fp8("fp8", FP8_E4M3),
    *_fp8("fp8_e5m2", FP8_E5M2),
    _scheme("fp6_weight_only", _tensor(FP6_E2M3, _ROWS)),
    _scheme("fp6_e3m2_weight_only", _tensor(FP6_E3M2, _ROWS)),
    _scheme("fp4_weight_only", _tensor(FP4_E2M1, _ROWS)),
    *_blocks("mxfp8", FP8_E4M3, MX_BLOCK, _E8M0),
    *_blocks("mxfp8_e5m2", FP8_E5M2, MX_BLOCK, _E8M0),
    *_blocks("mxfp6", FP6_E2M3, MX_BLOCK, _E8M0),
    *_blocks("mxfp6_e3m2", FP6_E3M2, MX_BLOCK, _E8M0),
    *_blocks("mxfp4", FP4_E2M1, MX_BLOCK, _E8M0),
    *_blocks("nvfp4", FP4_E2M1, NVFP4_BLOCK, _NV),
    _scheme("nf4", _tensor(NF4, PerGroup(NF4_BLOCK))),
    _scheme(
        "nf4_double",
        _tensor(NF4, PerGroup(NF4_BLOCK), scales=ScaleFormat(double_group=DOUBLE_GROUP)),
    ),
    *(scheme for bits in range(1, 9) for scheme in _look_up(bits)),
    _scheme("w1", _tensor(BINARY, _ROWS)),
    _scheme("w1.58", _TERNARY),
)
FORMAT_SCHEMES = MappingProxyType({scheme.name: scheme for scheme in _ALL})
"""Every name without a group size of its own."""

_GROUPED = re.compile(r"(?P<base>.+)_g(?P<size>[1-9]\d*)")


def format_scheme_named(name: str) -> Scheme | None:
    """The scheme of a name of the table, also `NAME_gG` of weights per row; None if it is none.

    >>> str(format_scheme_named("fp4_weight_only_g32").weight)
    'float4_e2m1fn PerGroup(group_size=32, axis=-1)'
    """
    found = FORMAT_SCHEMES.get(name)
    grouped = _GROUPED.fullmatch(name)
    if found is not None or grouped is None:
        return found
    base = FORMAT_SCHEMES.get(grouped["base"])
    if base is None or base.input is not None or base.weight is None:
        return None
    can_group = base.weight.granularity == _ROWS or grouped["base"] in ("nf4", "nf4_double")
    if not can_group:
        return None
    weight = replace(base.weight, granularity=PerGroup(int(grouped["size"])))
    return replace(base, name=name, weight=weight)


def code_book_scheme(
    book: CodeBook, granularity: Granularity, *, scales: ScaleFormat = FLOAT32_SCALES
) -> Scheme:
    """Weights alone, as places in a table of one's own.

    Args:
        book: with values: of magnitude 1 at most, say, times a scale for each block; without: a
            table of 2 ** bits values fitted to each block by k-means.
        granularity: the blocks.
        scales: how scales, or fitted values, are kept.
    """
    return _scheme(book.name, _tensor(book, granularity, scales=scales))

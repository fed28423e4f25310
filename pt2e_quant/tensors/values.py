"""Real values to codes and scales, and back, in the arithmetic of the graph flow.

The parts of a quantized tensor are a dict of tensors: `codes`, one per element, and of its scales
those that its scheme has: `scale` and `zero_point` of `blocks.grid_shape`, `tensor_scale`,
`steps` (of double-quantized scales) and `table` (of a code book).
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.arguments import check_tensor, check_type
from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams, KeptScale
from pt2e_quant.core.formats.blocks import grid_shape
from pt2e_quant.core.formats.format_arithmetic import (
    dequantize_block,
    dequantize_codebook,
    dequantize_float,
    quantize_block,
    quantize_codebook,
    quantize_float,
)
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.granularity import PerChannel, PerGroup, PerTensor
from pt2e_quant.core.qparams import QParams, quantize
from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.flow.annotate.groups import Group
from pt2e_quant.flow.annotate.observer_choice import ObserverChoice, is_plain
from pt2e_quant.flow.prepare.make_observer import make_observer
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.observers.weights.weight_search import WeightSearch
from pt2e_quant.tensors.form import TensorForm

Parts = dict[str, Tensor]
"""The parts that a layout of the codes leaves as they are."""


def check_values(
    values: object, scheme: object, input: object = None, qparams: object = None
) -> None:
    """Check that a tensor can be stored under a scheme, as far as their kinds tell.

    Raises:
        ConfigError: no real numbers, none at all, no scheme of constant scales, or other kinds.
    """
    check_tensor("values", values)
    check_type(
        "scheme",
        scheme,
        TensorScheme,
        "the scheme of one tensor, a TensorScheme",
        fix='pq.scheme_named("w8").weight',
    )
    if input is not None:
        check_type("input", input, TensorScheme, "the scheme of activations, a TensorScheme")
    if qparams is not None:
        check_type("qparams", qparams, (QParams, BlockQParams), "QParams or BlockQParams")
    assert isinstance(values, Tensor)
    assert isinstance(scheme, TensorScheme)
    if scheme.is_dynamic:
        raise ConfigError(
            f"a stored tensor has constant scales, found {scheme}",
            fix="give the activations' scheme as input=",
        )
    if not values.numel():
        raise ConfigError(
            f"there is nothing to quantize in a tensor of shape {tuple(values.shape)}",
            fix="leave it float",
        )


def find_qparams(
    values: Tensor, scheme: TensorScheme, search: WeightSearch = WeightSearch.MIN_MAX
) -> QParams | BlockQParams:
    """The qparams that the graph flow finds for a constant weight under a scheme.

    Args:
        values: the weight.
        scheme: how it is to be quantized.
        search: how scales are found.

    Raises:
        CalibrationError: NaN or infinity in the weight.
        ConfigError: its blocks do not fit the weight, or there is no such search.
    """
    observer: Any = _observer(scheme, WeightSearch.named(search)).twin()
    observer(values.detach())
    if hasattr(observer, "block_qparams"):
        found: BlockQParams = observer.block_qparams()
        return found
    return qparams_of(observer)


@lru_cache(maxsize=64)
def _observer(scheme: TensorScheme, search: WeightSearch) -> Any:
    """An observer that has seen nothing, to copy: making one takes longer than a small weight."""
    slot = Slot(at="w", role=Role.WEIGHT, accepts=(scheme,))
    return make_observer(Group(0, ObserverChoice(search=search).spec(slot, scheme)), {})


def quantize_values(values: Tensor, form: TensorForm, found: QParams | BlockQParams) -> Parts:
    """The parts of a tensor.

    Args:
        values: real values of `form.shape`.
        form: what they are to be.
        found: the qparams.
    """
    parts = qparam_parts(form, found)
    # What `encode` would make of the parts again.
    if isinstance(found, QParams) and _is_of_qparams(form):
        return {"codes": quantize(values.detach().contiguous(), found)} | parts
    return {"codes": encode(values, parts, form)} | parts


def qparam_parts(form: TensorForm, found: QParams | BlockQParams) -> Parts:
    """The parts that are made of qparams."""
    grid = grid_shape(form.shape, form.block)
    if isinstance(found, QParams):
        parts = {"scale": found.scale.reshape(grid)}
        if not form.scheme.symmetric or found.quant_min >= 0:
            parts["zero_point"] = _narrow(found.zero_point.reshape(grid), form.scheme)
        return parts
    kept = found.scale
    given = {
        "scale": None if kept is None else kept.values,
        "zero_point": None if found.zero_point is None else _narrow(found.zero_point, form.scheme),
        "tensor_scale": None if kept is None else kept.tensor_scale,
        "steps": None if kept is None else kept.steps,
        "table": found.table,
    }
    return {name: value for name, value in given.items() if value is not None}


def _narrow(zero_point: Tensor, scheme: TensorScheme) -> Tensor:
    """Zero points in the storage of the codes, whose range they are in."""
    return zero_point.to(info(scheme.dtype).storage)


def to_qparams(parts: Mapping[str, Tensor], form: TensorForm) -> QParams | BlockQParams:
    """The qparams that parts were made of, as the graph flow has them."""
    scheme = form.scheme
    zero = parts.get("zero_point")
    zero = None if zero is None else zero.to(torch.int32)
    if not is_plain(scheme) or not _is_of_qparams(form):
        scale = parts.get("scale")
        kept = None
        if scale is not None:
            kept = KeptScale(
                values=scale,
                tensor_scale=parts.get("tensor_scale"),
                steps=parts.get("steps"),
                group=scheme.scales.double_group,
            )
        return BlockQParams(
            scheme=scheme, block=form.block, scale=kept, zero_point=zero, table=parts.get("table")
        )
    low, high = scheme.range
    is_grouped = isinstance(scheme.granularity, PerGroup)
    shape = tuple(parts["scale"].shape) if is_grouped else (-1,)
    scale = parts["scale"].reshape(shape)
    return QParams(
        scale=scale,
        zero_point=torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero.view(shape),
        quant_min=low,
        quant_max=high,
        dtype=scheme.dtype,
        axis=_axis(form),
        group_size=getattr(scheme.granularity, "group_size", None),
    )


def _is_of_qparams(form: TensorForm) -> bool:
    granularity = form.scheme.granularity
    if isinstance(granularity, PerGroup):
        return len(form.shape) == 2 and form.shape[1] % granularity.group_size == 0
    return isinstance(granularity, PerTensor | PerChannel)


def _axis(form: TensorForm) -> int | None:
    granularity = form.scheme.granularity
    if not isinstance(granularity, PerChannel):
        return None
    return granularity.axis % len(form.shape)


def encode(values: Tensor, parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """The codes of real values under given qparams: one per element, in the storage dtype."""
    scheme, block = form.scheme, list(form.block)
    values = values.detach()
    if scheme.format is None:
        found = to_qparams(parts, form)
        if isinstance(found, QParams):
            return quantize(values.contiguous(), found)
        low, high = scheme.range
        zero, storage = parts.get("zero_point"), info(scheme.dtype).storage
        return quantize_block(values, real_scale(parts, form), zero, block, low, high, storage)
    if isinstance(scheme.format, CodeBook):
        scale = real_scale(parts, form) if "scale" in parts else None
        return quantize_codebook(values, parts["table"], scale, block)
    name, whole = scheme.format.name, parts.get("tensor_scale")
    if "steps" in parts:
        return quantize_float(values, real_scale(parts, form), None, block, name)
    return quantize_float(values, parts["scale"], whole, block, name)


def decode(parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """The real values of parts: `form.shape`, in `form.dtype`; what the canonical graph computes.

    Plain torch, so that a compiler fuses it.
    """
    scheme, block = form.scheme, list(form.block)
    codes = parts["codes"]
    if isinstance(scheme.format, CodeBook):
        scale = real_scale(parts, form) if "scale" in parts else None
        return dequantize_codebook(codes, parts["table"], scale, block, out_dtype=form.dtype)
    if isinstance(scheme.format, FloatFormat):
        scale, whole = parts["scale"], parts.get("tensor_scale")
        if "steps" in parts:
            scale, whole = real_scale(parts, form), None
        name = scheme.format.name
        return dequantize_float(codes, scale, whole, block, name, out_dtype=form.dtype)
    low, high = scheme.range
    scale, zero = real_scale(parts, form), parts.get("zero_point")
    return dequantize_block(codes, scale, zero, block, low, high, codes.dtype, out_dtype=form.dtype)


def real_scale(parts: Mapping[str, Tensor], form: TensorForm) -> Tensor:
    """The scales of the grid, double-quantized ones as float32; without a tensor's own unit."""
    if "steps" not in parts:
        return parts["scale"]
    kept = KeptScale(
        values=parts["scale"], steps=parts["steps"], group=form.scheme.scales.double_group
    )
    return kept.real()


def empty_parts(form: TensorForm, device: torch.device) -> Parts:
    """Parts of the right shapes and dtypes, with nothing in them: for a load into meta tensors."""
    scheme = form.scheme
    grid = grid_shape(form.shape, form.block)
    storage = info(scheme.dtype).storage if scheme.format is None else scheme.format.storage
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"codes": (form.shape, storage)}
    is_fitted = isinstance(scheme.format, CodeBook) and scheme.format.is_fitted
    if not is_fitted:
        doubled = scheme.scales.double_group
        shapes["scale"] = (grid, scheme.scales.dtype if doubled is None else torch.uint8)
        if doubled is not None:
            shapes["steps"] = ((math.ceil(math.prod(grid) / doubled),), torch.float32)
    if scheme.scales.in_tensor_units:
        shapes["tensor_scale"] = ((1,), torch.float32)
    if isinstance(scheme.format, CodeBook):
        count = 1 << scheme.bits if is_fitted else len(scheme.format.values)
        lead = grid if is_fitted and math.prod(grid) > 1 else ()
        dtype = scheme.scales.dtype if is_fitted else torch.float32
        shapes["table"] = ((*lead, count), dtype)
    elif scheme.format is None and (not scheme.symmetric or scheme.range[0] >= 0):
        shapes["zero_point"] = (grid, storage)
    return {
        name: torch.empty(shape, dtype=dtype, device=device)
        for name, (shape, dtype) in shapes.items()
    }

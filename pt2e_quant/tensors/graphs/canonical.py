"""A quantized tensor in the operators of the canonical graph: for export, and as the reference."""

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.formats import format_ops
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.granularity import PerTensor, PerToken
from pt2e_quant.core.qdq import (
    ChoosePerTensor,
    ChoosePerTensorSymmetric,
    ChoosePerToken,
    DequantizePerChannel,
    DequantizePerGroup,
    DequantizePerTensorDynamic,
    DequantizePerToken,
    QuantizePerTensorDynamic,
    QuantizePerToken,
)
from pt2e_quant.core.qparams import DEFAULT_EPS, QParams
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.tensors.quantized_tensor import QuantizedTensor
from pt2e_quant.tensors.values import real_scale, to_qparams


def emit_real_values(tensor: QuantizedTensor) -> Tensor:
    """The real values by the dequantize operator that a canonical graph has for the scheme."""
    layout = tensor.form.layout
    if torch.compiler.is_exporting() and layout not in ("plain", "packed"):
        raise ConfigError(
            f'torch.export takes the layouts "plain" and "packed", found "{layout}", which is '
            "memory of this machine",
            fix='pq.tensors.pack_(model, "plain") first, or pq.tensors.to_graph(model, args)',
        )
    parts, form = tensor.plain_parts(), tensor.form
    scheme, codes, block = form.scheme, parts["codes"], list(form.block)
    dtype = {} if form.dtype is torch.float32 else {"out_dtype": form.dtype}
    low, high = scheme.range
    found = to_qparams(parts, form)
    if isinstance(found, QParams):
        limits = (low, high, codes.dtype)
        if found.group_size is not None:
            real = DequantizePerGroup(
                codes, found.scale, found.zero_point, *limits, found.group_size, form.dtype
            )
        elif found.axis is not None:
            zero = found.zero_point.to(torch.int64)
            real = DequantizePerChannel(codes, found.scale, zero, found.axis, *limits, **dtype)
        else:
            zero = found.zero_point.to(torch.int64)
            real = DequantizePerTensorDynamic(codes, found.scale, zero, *limits, **dtype)
    elif isinstance(scheme.format, CodeBook):
        units = real_scale(parts, form) if "scale" in parts else None
        real = format_ops.DequantizeCodeBook(codes, parts["table"], units, block, **dtype)
    elif isinstance(scheme.format, FloatFormat):
        scale = real_scale(parts, form)
        whole = parts.get("tensor_scale")
        real = format_ops.DequantizeFloat(codes, scale, whole, block, scheme.format.name, **dtype)
    else:
        zeros = parts.get("zero_point")
        zeros = None if zeros is None else zeros.to(torch.int32)
        rest = (block, low, high, codes.dtype)
        real = format_ops.DequantizeBlock(codes, real_scale(parts, form), zeros, *rest, **dtype)
    return real.permute(form.axes) if not form.is_upright else real  # type: ignore[no-any-return]


def emit_input(x: Tensor, weight: QuantizedTensor) -> Tensor:
    """Activations quantized and dequantized as a weight's form says, by canonical operators."""
    scheme = weight.form.input
    assert scheme is not None  # the caller has looked
    static = {n: getattr(weight, n) for n in weight.part_names if n.startswith("input_")}
    return quantize_activation(x, scheme, **static)


def quantize_activation(
    x: Tensor,
    scheme: TensorScheme,
    input_scale: Tensor | None = None,
    input_zero_point: Tensor | None = None,
) -> Tensor:
    """Activations quantized and dequantized under a scheme.

    Args:
        x: float.
        scheme: dynamic, or static with the scale given.
        input_scale: float32[1] of a static scheme.
        input_zero_point: int32[1] of it.
    """
    is_affine = isinstance(scheme.granularity, PerTensor | PerToken)
    if scheme.format is not None or not is_affine:
        return _quantize_blocks(x, scheme, input_scale)
    low, high = scheme.range
    storage = info(scheme.dtype).storage
    if not scheme.is_dynamic:
        assert input_scale is not None
        assert input_zero_point is not None
        of_all = (input_scale, input_zero_point, low, high, storage)
        codes = QuantizePerTensorDynamic(x, *of_all)
        return DequantizePerTensorDynamic(codes, *of_all)  # type: ignore[no-any-return]
    if isinstance(scheme.granularity, PerToken):
        scale, zero = ChoosePerToken(x, scheme.dtype)
        of_rows = (scale, zero, low, high, scheme.dtype)
        return DequantizePerToken(QuantizePerToken(x, *of_rows), *of_rows, x.dtype)  # type: ignore[no-any-return]
    choose = ChoosePerTensorSymmetric if scheme.symmetric else ChoosePerTensor
    scale, zero = choose(x, low, high, DEFAULT_EPS, scheme.dtype)
    of_all = (scale, zero, low, high, storage)
    return DequantizePerTensorDynamic(QuantizePerTensorDynamic(x, *of_all), *of_all)  # type: ignore[no-any-return]


def _quantize_blocks(x: Tensor, scheme: TensorScheme, static_scale: Tensor | None) -> Tensor:
    """The same with scales in blocks, or with small floats."""
    form, block = scheme.format, list(block_lengths(scheme.granularity, x.dim()))
    if isinstance(form, CodeBook):
        raise ConfigError(f"activations have no code book, found {scheme}")
    limit, dtype = float(scheme.range[1]) if form is None else form.max, scheme.scales.dtype
    whole = None
    if scheme.scales.in_tensor_units:
        of_all = limit * torch.finfo(dtype).max
        whole = format_ops.ChooseScales(x, None, [-1] * x.dim(), of_all, torch.float32)
    scale = static_scale
    if scale is None:
        scale = format_ops.ChooseScales(x, whole, block, limit, dtype)
    scale = scale.reshape((1,) * x.dim()) if static_scale is not None else scale
    out = {} if x.dtype is torch.float32 else {"out_dtype": x.dtype}
    if form is not None:
        codes = format_ops.QuantizeFloat(x, scale, whole, block, form.name)
        return format_ops.DequantizeFloat(codes, scale, whole, block, form.name, **out)  # type: ignore[no-any-return]
    low, high = scheme.range
    limits = (block, low, high, info(scheme.dtype).storage)
    codes = format_ops.QuantizeBlock(x, scale, None, *limits)
    return format_ops.DequantizeBlock(codes, scale, None, *limits, **out)  # type: ignore[no-any-return]

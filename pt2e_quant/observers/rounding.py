"""Round a tensor as the quantize and dequantize of its observer would, without a graph."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.formats.format_arithmetic import (
    choose_scales,
    dequantize_block,
    dequantize_codebook,
    dequantize_float,
    quantize_block,
    quantize_codebook,
    quantize_float,
)
from pt2e_quant.core.formats.number_formats import CodeBook, FloatFormat
from pt2e_quant.core.qdq import (
    ChoosePerToken,
    DequantizePerToken,
    QuantizePerToken,
)
from pt2e_quant.core.qparams import fake_quantize
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.run_time.placeholder import RunTimeScales
from pt2e_quant.observers.static.float_activation import FloatActivationObserver
from pt2e_quant.observers.training.trained_qparams import qparams_of

_lib = torch.ops.quantized_decomposed


def rounded(observer: Any, x: Tensor) -> Tensor:
    """Quantize and dequantize a tensor by what an observer has come to; the dtype stays.

    Where an observer leaves its tensor float, or brings operators of its own, x itself.
    """
    made = x
    if isinstance(observer, RunTimeScales):
        made = _by_run_time_scales(observer.scheme, x)
    elif isinstance(observer, FloatActivationObserver):
        made = by_blocks(observer.block_qparams(x.dim()), x)
    elif hasattr(observer, "block_qparams"):
        made = by_blocks(observer.block_qparams(), x)
    elif hasattr(observer, "convert") or observer.dtype in (torch.float32, torch.bfloat16):
        made = x
    elif observer.dtype == torch.float16:
        made = x.to(torch.float16)
    elif getattr(observer, "is_dynamic", False):
        made = _by_found_qparams(observer, x)
    else:
        made = fake_quantize(x, qparams_of(observer))
    return made.to(x.dtype)


def _by_found_qparams(observer: Any, x: Tensor) -> Tensor:
    """Round by qparams of the tensor itself, or of each of its rows."""
    x = x.to(torch.float32)
    if getattr(observer, "is_per_token", False):
        limits = observer.quant_min, observer.quant_max
        found = ChoosePerToken(x, observer.dtype)
        codes = QuantizePerToken(x, *found, *limits, observer.dtype)
        return torch.as_tensor(
            DequantizePerToken(codes, *found, *limits, observer.dtype, torch.float32)
        )
    limits_of_dtype = info(observer.dtype)
    low = limits_of_dtype.quant_min if observer.quant_min is None else int(observer.quant_min)
    high = limits_of_dtype.quant_max if observer.quant_max is None else int(observer.quant_max)
    eps = float(getattr(observer, "eps", torch.finfo(torch.float32).eps))
    is_symmetric = observer.qscheme == torch.per_tensor_symmetric
    choose = _lib.choose_qparams_symmetric.tensor if is_symmetric else _lib.choose_qparams.tensor
    scale, zero_point = choose(x, low, high, eps, observer.dtype)
    codes = torch.round(x / scale.to(x.dtype)).add_(zero_point).clamp_(low, high)
    return codes.sub_(zero_point).mul_(scale.to(x.dtype))


def by_blocks(qparams: BlockQParams, x: Tensor) -> Tensor:
    """Round by qparams in blocks, of any form."""
    form, block = qparams.scheme.format, qparams.block
    scale = None if qparams.scale is None else qparams.scale.real()
    if isinstance(form, CodeBook):
        assert qparams.table is not None  # a code book has one
        codes = quantize_codebook(x, qparams.table, scale, block)
        return dequantize_codebook(codes, qparams.table, scale, block)
    assert scale is not None  # integers and small floats have scales
    if isinstance(form, FloatFormat):
        codes = quantize_float(x, scale, None, block, form.name)
        return dequantize_float(codes, scale, None, block, form.name)
    arguments = (scale, qparams.zero_point, block, *qparams.scheme.range, torch.int32)
    return dequantize_block(quantize_block(x, *arguments), *arguments)


def _by_run_time_scales(scheme: TensorScheme, x: Tensor) -> Tensor:
    form, block = scheme.format, block_lengths(scheme.granularity, x.dim())
    limit = form.max if isinstance(form, FloatFormat) else float(scheme.range[1])
    whole = None
    if scheme.scales.in_tensor_units:
        greatest = limit * torch.finfo(scheme.scales.dtype).max
        whole = choose_scales(x, None, [-1] * x.dim(), greatest, torch.float32)
    scale = choose_scales(x, whole, block, limit, scheme.scales.dtype)
    if isinstance(form, FloatFormat):
        codes = quantize_float(x, scale, whole, block, form.name)
        return dequantize_float(codes, scale, whole, block, form.name)
    arguments = (scale, None, block, *scheme.range, torch.int32)
    return dequantize_block(quantize_block(x, *arguments), *arguments)

"""The definition of quantize_per_tensor: torch's choose and quantize, step for step."""

import torch
from torch import Tensor

from pt2e_quant.core.formats.blocks import WHOLE
from pt2e_quant.core.formats.format_arithmetic import choose_scales, quantize_float
from pt2e_quant.core.formats.number_formats import FP8_E4M3


def tensor_qparams(
    x: Tensor, quant_min: int, quant_max: int, eps: float, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Scale float32[1] and zero point int32[1] of a tensor's least and greatest value, and 0.

    The arithmetic is that of torch's `choose_qparams.tensor` and `choose_qparams_symmetric.tensor`
    on the CPU: the range and the scale are rounded to x's dtype, what follows to float32.
    """
    low, high = torch.aminmax(x) if x.numel() else (x.new_zeros(()), x.new_zeros(()))
    low, high = low.clamp_max(0), high.clamp_min(0)
    if symmetric:
        scale = torch.maximum(-low, high) / ((quant_max - quant_min) / 2)
    else:
        scale = (high - low) / float(quant_max - quant_min)
    scale = scale.float().clamp_min(eps).reshape(1)
    if symmetric:
        return scale, torch.zeros_like(scale, dtype=torch.int32)
    zero_point = quant_min - torch.round(low.float() / scale).to(torch.int32)
    return scale, zero_point.clamp(quant_min, quant_max)


def quantize_per_tensor(
    x: Tensor,
    quant_min: int = -128,
    quant_max: int = 127,
    eps: float = 2.0**-23,
    symmetric: bool = False,
    *,
    label: str = "",
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scale and zero point of x; see `op.QuantizeTensor`."""
    scale, zero_point = tensor_qparams(x, quant_min, quant_max, eps, symmetric)
    # As a float64 that is rounded to float32: torch divides 1 by the number that the scale is.
    steps = torch.round(x.float() * (1.0 / scale.double()).float()) + zero_point
    integers = torch.empty_like(x, dtype=torch.int8)
    return integers.copy_(steps.clamp_(quant_min, quant_max)), scale, zero_point


def quantize_per_tensor_e4m3(x: Tensor, *, label: str = "") -> tuple[Tensor, Tensor]:
    """8-bit floats of x and their scale; see `op.QuantizeTensorE4m3`."""
    block = [WHOLE] * x.dim()
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    held = x if x.numel() else x.new_zeros([1] * x.dim())
    # On the CPU, where a division by a number is one: on a GPU torch multiplies by its inverse.
    scale = choose_scales(held, None, block, FP8_E4M3.max, torch.float32)
    if x.numel():
        codes.copy_(quantize_float(x, scale, None, block, FP8_E4M3.name))
    return codes, scale

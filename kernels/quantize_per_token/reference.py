"""The definition of quantize_per_token: torch's choose and quantize, step for step."""

import torch
from torch import Tensor

from pt2e_quant.core.formats.format_arithmetic import choose_scales, quantize_float
from pt2e_quant.core.formats.number_formats import FP8_E4M3

LEAST_SCALE = 2.0**-23
"""float32's eps, as `choose_qparams_per_token_asymmetric` has it; every float dtype has it."""


def row_qparams(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and zero point of int8 for each row of x, in x's dtype: [..., 1] each.

    Every step is rounded to x's dtype. The arithmetic is that of torch's
    `choose_qparams_per_token_asymmetric` on the CPU, where a division is rounded once: on CUDA
    torch multiplies by 1 / 255 in its place, and scales there may differ in the last bit.
    """
    low = torch.amin(x, dim=-1, keepdim=True).clamp_max(0)
    high = torch.amax(x, dim=-1, keepdim=True).clamp_min(0)
    scale = ((high - low) / 255.0).clamp(min=LEAST_SCALE)
    low_steps, high_steps = low / scale, high / scale
    # The end whose zero point is off by less.
    is_from_low = (-128 + low_steps) + (127 + high_steps) > 0
    zero_point = torch.where(is_from_low, -128 - low_steps, 127 - high_steps)
    return scale, zero_point.clamp(-128, 127).round()


def quantize_per_token(
    x: Tensor, quant_min: int = -128, quant_max: int = 127, *, label: str = ""
) -> tuple[Tensor, Tensor, Tensor]:
    """Integers, scales and zero points of the rows of x; see `op.QuantizeRows`."""
    scale, zero_point = row_qparams(x)
    # In float64, as quantized_decomposed.quantize_per_token computes with its float64 scales.
    steps = torch.round(x.double() * (1.0 / scale.double()) + zero_point.double())
    integers = steps.clamp(quant_min, quant_max).to(torch.int8)
    return integers, scale.float(), zero_point.to(torch.int32)


def quantize_per_token_e4m3(x: Tensor, *, label: str = "") -> tuple[Tensor, Tensor]:
    """8-bit floats and scales of the rows of x; see `op.QuantizeRowsE4m3`."""
    block = (*[1] * (x.dim() - 1), -1)
    # On the CPU, where a division by a number is one: on a GPU torch multiplies by its inverse.
    scale = choose_scales(x, None, block, FP8_E4M3.max, torch.float32)
    return quantize_float(x, scale, None, block, FP8_E4M3.name).contiguous(), scale

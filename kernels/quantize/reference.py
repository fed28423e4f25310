"""The definition of quantize: dequantize, activation and quantize, step for step in float32."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.reference import finish, requantize_real

PIXEL = 4
"""Channels that `quantize_pixels` writes: a pixel is one aligned word of 32 bits."""


def real_values(x: Tensor, scale: float, zero_point: int) -> Tensor:
    """Float32 of x: (x - zero_point) * scale if it holds integers, else its own values."""
    if x.dtype not in INTEGER_OUTPUTS:
        return x.float()
    return (x.float() - zero_point) * scale


def quantize(
    x: Tensor, *, x_scale: float = 1.0, x_zero_point: int = 0, label: str = "", **output: Any
) -> Tensor:
    """Dequantize, activate and quantize x; see `op.Quantize` for the arguments."""
    end = Epilogue(**output)
    made = finish(real_values(x, x_scale, x_zero_point), end)
    return torch.empty_like(x, dtype=end.out_dtype).copy_(made)


def quantize_pixels(
    x: Tensor,
    *,
    out_scale: float = 1.0,
    out_zero_point: int = 0,
    out_min: int = -128,
    out_max: int = 127,
    label: str = "",
) -> Tensor:
    """Quantize images and fill their pixels; see `op.QuantizePixels` for the arguments."""
    end = Epilogue(
        out_dtype=torch.int8,
        out_scale=out_scale,
        out_zero_point=out_zero_point,
        out_min=out_min,
        out_max=out_max,
    )
    N, C, H, W = x.shape
    made = x.new_full((N, H, W, PIXEL), out_zero_point, dtype=torch.int8)
    made[..., :C] = requantize_real(x.float(), end).permute(0, 2, 3, 1)
    return made.permute(0, 3, 1, 2)

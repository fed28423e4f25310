"""The definition of quantize: dequantize, activation and quantize, step for step in float32."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.reference import finish

__all__ = ["quantize", "real_values"]


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

"""fp8_linear by `torch._scaled_mm`: cuBLAS where it takes the scales, with nothing fused behind."""

import torch
from torch import Tensor

__all__ = ["scaled_mm", "takes_scaled_mm"]

_FEWEST_ROWS = 65
"""With fewer the time is that of reading the weight, which splits of K spread over the device."""


def takes_scaled_mm(
    M: int,
    N: int,
    K: int,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    capability: int,
) -> bool:
    """Whether `scaled_mm` runs a product, and is for its number of rows.

    cuBLAS needs sizes that are multiples of 16. Scales of rows need Hopper, and give bfloat16.
    """
    if M < _FEWEST_ROWS or N % 16 or K % 16:
        return False
    if x_scale.numel() == 1 and weight_scale.numel() == 1:
        return capability >= 89
    return capability >= 90 and out_dtype is torch.bfloat16


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The product and its scales, without what follows; see `op.Fp8Linear` for the arguments."""
    N, K = weight.shape
    rows = x.reshape(-1, K)
    left, right = x_scale.reshape(-1, 1), weight_scale.reshape(1, -1)
    if left.numel() > 1 or right.numel() > 1:
        left = left.expand(len(rows), 1).contiguous()
        right = right.expand(1, N).contiguous()
    else:
        left, right = left.reshape(()), right.reshape(())
    made = torch._scaled_mm(rows, weight.t(), left, right, out_dtype=out_dtype)
    return made.reshape((*x.shape[:-1], N))

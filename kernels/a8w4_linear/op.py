"""The operator `pt2e_quant::a8w4_linear`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.a8w4_linear import reference
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel

__all__ = ["A8w4Linear", "cost"]


def _fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=out_dtype)


A8w4Linear = define(
    "a8w4_linear(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    f"Tensor weight_scale, Tensor weight_sum, int group_size, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.a8w4_linear,
    triton=triton_kernel("pt2e_quant.kernels.a8w4_linear.gpu", "a8w4_linear"),
    fake=_fake,
)
"""y = epilogue(x_scale * (sum over runs of k: scale of the group * sum_k x * weight  -  zero point
* sum_k of the scaled weights)), the sum over k of (x - zero point) times the scaled weights.

    x: int8[..., K], contiguous.
    x_scale, x_zero_point: float32 and int32 of one element, or of M, one a row (M rows in all).
    weight: int8[ceil(K / 2 h), N, h], 4-bit integers as `pack.pack_halves` lays them out; h is
        `pack.half_of(group_size, K)`.
    weight_scale: float32, float16 or bfloat16[K / group_size, N].
    weight_sum: float32[N], `pack.weight_sums`: what a zero point of 1 takes off.
    group_size: 32, 64, a multiple of 128, or K.
    label: the node and layout, for the profiler.
"""


def cost(x: Tensor, weight: Tensor, weight_scale: Tensor, weight_sum: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, weight_scale, weight_sum, out) + 8 * rows,
        operations=2 * rows * weight.shape[1] * K,
    )

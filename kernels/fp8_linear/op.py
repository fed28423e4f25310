"""The operator `pt2e_quant::fp8_linear`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fp8_linear import reference
from pt2e_quant.kernels.fused_op import define, triton_kernel

__all__ = ["Fp8Linear", "cost"]


def _fake(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


Fp8Linear = define(
    "fp8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, "
    f'{EPILOGUE_SCHEMA}, str label="") -> Tensor',
    reference=reference.fp8_linear,
    triton=triton_kernel("pt2e_quant.kernels.fp8_linear.gpu", "fp8_linear"),
    fake=_fake,
)
"""y = epilogue(sum_k x * weight, times weight_scale, times x_scale).

    x: float8_e4m3fn[..., K].
    x_scale: float32 of one element, or of M, one a row (M rows in all).
    weight: float8_e4m3fn[N, K].
    weight_scale: float32 of one element, or of N.
    label: the node and layout, for the profiler.

On a GPU the sums are within `reference.error_bound` of the definition.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, out) + 4 * (rows + weight.shape[0]),
        operations=2 * rows * weight.shape[0] * K,
    )

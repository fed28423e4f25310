"""The operator `pt2e_quant::int8_linear`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_linear import multiply_cpu, reference

__all__ = ["Int8Linear", "cost"]


def _fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


Int8Linear = define(
    "int8_linear(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    f"Tensor weight_scale, Tensor weight_sum, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_linear,
    triton=triton_kernel("pt2e_quant.kernels.int8_linear.gpu", "int8_linear"),
    fake=_fake,
    cpu=multiply_cpu.int8_linear,
)
"""y = epilogue(sum_k (x - x_zero_point) * weight, times x_scale * weight_scale).

    x: int8[..., K], contiguous.
    x_scale, x_zero_point: float32 and int32, [1], or [M] for one a row (M rows in all).
    weight: int8[N, K], contiguous; its zero point is 0.
    weight_scale: float32[N].
    weight_sum: int32[N], the sum of each row of weight.
    label: the node and layout, for the profiler.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, weight, out) + 8 * weight.shape[0],
        operations=2 * rows * weight.shape[0] * weight.shape[1],
    )

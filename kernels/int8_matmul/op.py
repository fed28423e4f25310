"""The operator `pt2e_quant::int8_matmul`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_matmul import reference
from pt2e_quant.kernels.int8_matmul.batches import read_batches

__all__ = ["Int8Matmul", "cost"]


def _fake(
    left: Tensor,
    right: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    batches = read_batches(left.shape, right.shape)
    return left.new_empty((*batches.shape, left.shape[-2], right.shape[-1]), dtype=out_dtype)


Int8Matmul = define(
    "int8_matmul(Tensor left, Tensor right, float scale, int left_zero_point, "
    f"int right_zero_point, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_matmul,
    triton=triton_kernel("pt2e_quant.kernels.int8_matmul.gpu", "int8_matmul"),
    fake=_fake,
)
"""y = epilogue(scale * sum_k (left - left_zero_point) * (right - right_zero_point)).

    left: int8[..., M, K], of any strides: a transpose or an expand of it costs nothing.
    right: int8[..., K, N], likewise; transposed (its K axis contiguous) it is read fastest.
        Leading axes broadcast, and its last one may divide left's: grouped heads.
    scale: scale of left times scale of right times a factor (attention's 1 / sqrt(width)).
    left_zero_point, right_zero_point: the integers that stand for 0.0.
    label: the node and layout, for the profiler.

The result is [..., M, N], contiguous; a bias has N elements.
"""


def cost(left: Tensor, right: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    return Cost(bytes=moved_bytes(left, right, out), operations=2 * out.numel() * left.shape[-1])

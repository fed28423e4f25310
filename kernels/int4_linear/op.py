"""The operator `pt2e_quant::int4_linear`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int4_linear import reference

__all__ = ["Int4Linear", "cost"]


def _fake(
    x: Tensor,
    weight: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1]), dtype=out_dtype)


Int4Linear = define(
    "int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, int group_size, *, "
    f'{EPILOGUE_SCHEMA}, str label="") -> Tensor',
    reference=reference.int4_linear,
    triton=triton_kernel("pt2e_quant.kernels.int4_linear.gpu", "int4_linear"),
    fake=_fake,
)
"""y = epilogue(sum_k x * (code - zero_point) * scale), with the group of k's scale.

    x: float16, bfloat16 or float32[..., K], finite.
    weight: int32[ceil(K / 128), N, 16], codes from 0 to 15 as `pack.pack_codes` lays them out.
    scale: float16, bfloat16 or float32[K / group_size, N].
    zero_point: uint8[K / group_size, N], codes; None for 8 everywhere (symmetric weights).
    group_size: 32, 64, a multiple of 128, or K.
    label: the node and layout, for the profiler.

Kernels are within `reference.error_bound` of the definition.
"""


def cost(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations.

    In groups of 128 a weight is 0.516 bytes with a 16-bit scale, 0.523 with a zero point.
    """
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, scale, zero_point, out),
        operations=2 * rows * weight.shape[1] * K,
    )

"""The operator `pt2e_quant::int8_pool`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_pool import reference

__all__ = ["Int8Pool", "cost"]


def _fake(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    out_size: Sequence[int],
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return reference.like_images(x, out_size, out_dtype)


Int8Pool = define(
    "int8_pool(Tensor x, str kind, int[] kernel, int[] stride, int[] padding, int[] out_size, "
    "bool counts_padding=True, int divisor=0, *, float x_scale=1.0, int x_zero_point=0, "
    f'{OUTPUT_SCHEMA}, str label="") -> Tensor',
    reference=reference.int8_pool,
    triton=triton_kernel("pt2e_quant.kernels.int8_pool.gpu", "int8_pool"),
    fake=_fake,
)
"""y = q(activation(pool(dq(x)))) of images [N, C, H, W]; the result is channels-last.

    x: int8 or uint8 with the qparams x_scale and x_zero_point; channels-last without a copy.
    kind: of `windows.PoolKind`.
    kernel, stride, padding: (H, W) each; not read where kind is "adaptive". No dilation.
    out_size: (H, W) of the result, as torch computes it with or without ceil_mode.
    counts_padding, divisor: what an average divides by; divisor is 0 for the elements' number.
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

Every window has an element: padding is at most half of the kernel.
"""


def cost(x: Tensor, out: Tensor, window: int) -> Cost:
    """Bytes of one call, and an operation for each element of each window."""
    return Cost(bytes=moved_bytes(x, out), operations=out.numel() * window)

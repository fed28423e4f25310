"""The operator `pt2e_quant::int8_conv2d`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_conv2d import reference
from pt2e_quant.kernels.int8_conv2d.window import conv_sizes

__all__ = ["Int8Conv2d", "cost"]


def _fake(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sums: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    sizes = conv_sizes(x.shape, weight.shape, stride, padding, dilation, groups)
    shape = (sizes.batch, *sizes.out, sizes.outputs)
    return x.new_empty(shape, dtype=out_dtype).permute(0, 3, 1, 2)


Int8Conv2d = define(
    "int8_conv2d(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    "Tensor weight_scale, Tensor weight_sums, int[] stride, int[] padding, int[] dilation, "
    f"int groups, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_conv2d,
    triton=triton_kernel("pt2e_quant.kernels.int8_conv2d.gpu", "int8_conv2d"),
    fake=_fake,
)
"""y = epilogue(convolution of (x - x_zero_point) with weight, times x_scale * weight_scale).

    x: int8[N, C, H, W], channels-last in memory (else it is copied first). Padding stands for
        0.0: it holds the zero point.
    x_scale, x_zero_point: float32[1] and int32[1].
    weight: as `pack.pack_weight` makes it; its zero point is 0.
    weight_scale: float32[O].
    weight_sums: int32[KH + 1, KW + 1, O], as `pack.window_sums` makes it.
    stride, padding, dilation: (along H, along W).
    groups: of channels.
    label: the node and layout, for the profiler.

The result is [N, O, OH, OW], channels-last in memory; so is a residual.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    products = weight.numel() // out.shape[1]
    return Cost(
        bytes=moved_bytes(x, weight, out) + 8 * out.shape[1],
        operations=2 * out.numel() * products,
    )

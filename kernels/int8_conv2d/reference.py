"""The definition of int8_conv2d: exact int32 sums, then float32 steps in a stated order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.products import Window, convolve
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int8_conv2d.pack import unpack_weight


def int8_conv2d(
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
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The convolution of x with the unpacked weight; see `op.Int8Conv2d` for the arguments.

    The sum is exact in int32, and padding adds nothing to it: it stands for 0.0. It is rounded
    to float32, multiplied by x_scale * weight_scale (one float32), and goes through the
    epilogue. weight_sums is what kernels correct the zero point with; here the zero point is
    taken off before.
    """
    total = convolve(
        compute,
        x,
        unpack_weight(weight),
        None,
        Window(stride=stride, padding=padding, dilation=dilation, groups=groups),
        x_zero_point=x_zero_point.to(torch.int16),
        weight_zero_point=0,
        x_storage=torch.int8,
        weight_storage=torch.int8,
    )
    real = total.float() * (x_scale * weight_scale).reshape(-1, 1, 1)
    made = finish(real, Epilogue(**epilogue), channel_axis=1)
    N, outputs, H, W = made.shape
    return made.new_empty((N, H, W, outputs)).permute(0, 3, 1, 2).copy_(made)

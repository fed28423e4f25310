"""The definition of int8_matmul: exact int32 sums, then float32 steps in a stated order."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int8_matmul.batches import read_batches


def int8_matmul(
    left: Tensor,
    right: Tensor,
    scale: float,
    left_zero_point: int,
    right_zero_point: int,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The product of what left and right stand for; see `op.Int8Matmul` for the arguments.

    The sum is exact in int32. It is rounded to float32, multiplied by scale (rounded to float32),
    and goes through the epilogue.
    """
    batches = read_batches(left.shape, right.shape)
    if batches.repeats > 1:
        right = right.repeat_interleave(batches.repeats, dim=-3)
    # torch multiplies no integers on GPUs. A float64 holds such sums exactly.
    total = torch.matmul(left.double() - left_zero_point, right.double() - right_zero_point)
    real = total.float() * torch.tensor(scale, dtype=torch.float32, device=total.device)
    return finish(real, Epilogue(**epilogue)).contiguous()

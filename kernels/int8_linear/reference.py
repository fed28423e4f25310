"""The definition of int8_linear: exact int32 sums, then float32 steps in a stated order."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.calls import compute
from pt2e_quant.core.integer_ops.products import multiply_rows
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish


def int8_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The rows of x times the rows of weight; see `op.Int8Linear` for the arguments.

    The sum is exact in int32. It is rounded to float32, multiplied by x_scale * weight_scale
    (one float32), and goes through the epilogue. weight_sum is what kernels correct the zero
    point with; here the zero point is taken off before.
    """
    rows = x.reshape(-1, x.shape[-1])
    total = multiply_rows(
        compute,
        rows,
        weight,
        None,
        x_zero_point=x_zero_point.reshape(-1, 1).to(torch.int16),
        weight_zero_point=0,
        x_storage=torch.int8,
        weight_storage=torch.int8,
    )
    real = total.float() * (x_scale.reshape(-1, 1) * weight_scale)
    shape = (*x.shape[:-1], weight.shape[0])
    return finish(real.reshape(shape), Epilogue(**epilogue))

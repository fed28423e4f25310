"""The definition of int4_linear: exact dequantized weights, sums in float64 rounded once."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish
from pt2e_quant.kernels.int4_linear.pack import BLOCK, OFFSET, unpack_codes


def dequantize_weight(
    weight: Tensor, scale: Tensor, zero_point: Tensor | None, group_size: int, K: int
) -> Tensor:
    """(code - zero_point) * scale in float32[N, K]; see `op.Int4Linear` for the arguments."""
    steps = unpack_codes(weight, K).to(torch.float32).view(-1, K // group_size, group_size)
    zeros: Tensor | int = OFFSET if zero_point is None else zero_point.t().unsqueeze(-1)
    real = (steps - zeros) * scale.to(torch.float32).t().unsqueeze(-1)
    return real.view(-1, K)


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The rows of x times the dequantized weight; see `op.Int4Linear` for the arguments.

    Each weight is (code - zero_point) * scale, rounded to float32 as the canonical dequantize
    rounds it; products and sums are float64; their sum is rounded to float32 and goes through the
    epilogue.
    """
    K = x.shape[-1]
    end = Epilogue(**epilogue)
    if K == 0:
        return finish(x.new_zeros((*x.shape[:-1], weight.shape[1]), dtype=torch.float32), end)
    real = dequantize_weight(weight, scale, zero_point, group_size, K)
    total = x.to(torch.float64) @ real.to(torch.float64).t()
    return finish(total.to(torch.float32), end)


def error_bound(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    *,
    splits: int,
) -> Tensor:
    """Return the bound of a kernel's error before the epilogue: float64[..., N].

    A kernel multiplies activations by code - zero_point, both exact, adds the products of a run of
    at most 128 in float32, multiplies the sum by the scale and adds the runs, then the splits. A
    chain of n additions is within n u sum|x w| of the exact one, u = 2^-23 as matrix units may
    truncate. The weight's own rounding, the scale's product and the result's add one u each.
    """
    K = x.shape[-1]
    real = dequantize_weight(weight, scale, zero_point, group_size, K)
    magnitude = x.to(torch.float64).abs() @ real.to(torch.float64).abs().t()
    runs = -(-K // min(BLOCK, group_size))
    additions = min(BLOCK, group_size) + runs + splits
    return magnitude * ((additions + 3) * 2.0**-23)

"""The definition of a8w4_linear: exact int32 sums of runs, scaled and added in float32 in order."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.a8w4_linear.pack import run_of, unpack_halves
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish

__all__ = ["a8w4_linear", "split_bound"]


def a8w4_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    group_size: int,
    *,
    label: str = "",
    **epilogue: Any,
) -> Tensor:
    """The rows of x times the rows of weight; see `op.A8w4Linear` for the arguments.

    A run is 32 or 64 k's in groups of that size, else 128 (the last one of a row perhaps less).
    The products of a run are summed exactly in int32, with the zero point taken off; the sum is
    rounded to float32, multiplied by its group's scale and added to those before it, ascending,
    each step rounded to float32. The total times x_scale goes through the epilogue. weight_sum is
    what kernels correct the zero point with; here the zero point is taken off before.
    """
    K = x.shape[-1]
    total = torch.zeros((x.numel() // max(1, K), weight.shape[1]), device=x.device)
    for sums, scale in _runs(x, x_zero_point, weight, weight_scale, group_size):
        total = total + sums.to(torch.float32) * scale
    real = total * x_scale.to(torch.float32).reshape(-1, 1)
    return finish(real.reshape((*x.shape[:-1], weight.shape[1])), Epilogue(**epilogue))


def _runs(
    x: Tensor, x_zero_point: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int
) -> list[tuple[Tensor, Tensor]]:
    """The sums of each run, float64[M, N] that are integers, and its scale float32[N]."""
    K = x.shape[-1]
    run = run_of(group_size, K)
    # Float64 holds every sum of a run, and multiplies matrices fast.
    rows = (x.reshape(-1, K).to(torch.float64) - x_zero_point.reshape(-1, 1)) if K else x
    integers = unpack_halves(weight, K).to(torch.float64)
    return [
        (
            rows[:, start : start + run] @ integers[:, start : start + run].t(),
            weight_scale[start // group_size].to(torch.float32),
        )
        for start in range(0, K, run)
    ]


def split_bound(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    group_size: int,
    *,
    splits: int,
) -> Tensor:
    """How far a product cut along K may be from the definition before the epilogue: float64[M, N].

    0 for one split: kernels take the definition's own steps. With more the same float32 numbers
    are added in another order. Either order is within (runs + splits) u sum|run * scale| of the
    exact sum, u = 2^-24.
    """
    found = _runs(x, x_zero_point, weight, weight_scale, group_size)
    shape = (x.numel() // max(1, x.shape[-1]), weight.shape[1])
    magnitude = torch.zeros(shape, dtype=torch.float64)
    if splits == 1:
        return magnitude
    for sums, scale in found:
        magnitude = magnitude + sums.abs() * scale
    steps = 2 * (len(found) + splits) + 2
    return magnitude * x_scale.reshape(-1, 1) * (steps * 2.0**-24)

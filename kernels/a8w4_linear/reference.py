"""The definition of a8w4_linear: exact int32 sums of runs, added in float32 by multiply-adds."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.a8w4_linear.pack import run_of, unpack_halves
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.reference import finish


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
    The products of a run are summed exactly in int32. Its sum times its group's scale is added to
    those before it, ascending: a multiply-add in float32, rounded once. Last, the zero point times
    weight_sum is taken off, also rounded once. The total times x_scale goes through the epilogue.
    """
    total = torch.zeros(_shape(x, weight), device=x.device)
    for sums, scale in _runs(x, weight, weight_scale, group_size):
        total = multiply_add(sums, scale, total)
    total = multiply_add(-x_zero_point.reshape(-1, 1), weight_sum, total)
    real = total * x_scale.to(torch.float32).reshape(-1, 1)
    return finish(real.reshape((*x.shape[:-1], weight.shape[1])), Epilogue(**epilogue))


def multiply_add(factor: Tensor, other: Tensor, addend: Tensor) -> Tensor:
    """The addend plus factor * other in float32, rounded once as the hardware's multiply-add does.

    The product has to be exact in float64. Boldo and Melquiond, "Emulation of FMA and correctly
    rounded sums" (2008): a sum rounded to odd may be rounded again.

    >>> one = torch.ones(1)
    >>> multiply_add(one + 2.0**-23, one + 2.0**-22, -one).item() == 3 * 2.0**-23 + 2.0**-45
    True
    """
    product, start = factor.to(torch.float64) * other.to(torch.float64), addend.to(torch.float64)
    near = product + start
    # What float64 cut off (Knuth's TwoSum) leaves its mark in an odd last bit.
    back = near - product
    lost = (product - (near - back)) + (start - back)
    bits = near.view(torch.int64)
    step = torch.where((lost > 0) == (near > 0), 1, -1)
    odd = torch.where((lost != 0) & ((bits & 1) == 0), bits + step, bits)
    return odd.view(torch.float64).to(torch.float32)


def _shape(x: Tensor, weight: Tensor) -> tuple[int, int]:
    """The sizes of the sums: M and N."""
    return x.numel() // max(1, x.shape[-1]), weight.shape[1]


def _runs(
    x: Tensor, weight: Tensor, weight_scale: Tensor, group_size: int
) -> list[tuple[Tensor, Tensor]]:
    """The sums of each run, float64[M, N] that are integers, and its scale float32[N]."""
    K = x.shape[-1]
    run = run_of(group_size, K)
    # Float64 holds every sum of a run, and multiplies matrices fast.
    rows = x.reshape(-1, K).to(torch.float64) if K else x
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
    """Return the error bound of a product cut along K before the epilogue: float64[M, N].

    0 for one split: kernels take the definition's own steps. With more the same float32 numbers
    are added in another order, the zero point's somewhere between. Either order is within
    (runs + splits + 1) u (sum|run * scale| + |zero point * weight_sum|) of the exact sum, with
    u = 2^-24; two units more are for the product with x_scale.
    """
    found = _runs(x, weight, weight_scale, group_size)
    magnitude = torch.zeros(_shape(x, weight), dtype=torch.float64, device=x.device)
    if splits == 1:
        return magnitude
    for sums, scale in found:
        magnitude = magnitude + sums.abs() * scale
    magnitude = magnitude + (x_zero_point.reshape(-1, 1) * weight_sum.to(torch.float64)).abs()
    steps = 2 * (len(found) + splits + 1) + 2
    return magnitude * x_scale.reshape(-1, 1) * (steps * 2.0**-24)

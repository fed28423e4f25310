"""Sums over windows, and products that `out_dtype` has no kernel for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.integer_ops.define import define_integer_op

_aten: Any = torch.ops.aten
_DTYPES = {32: torch.int32, 64: torch.int64}


def _matmul(x: Tensor, y: Tensor, bits: int) -> Tensor:
    # A float64 holds sums up to 2**53 exactly, and has the faster kernels.
    return (x.double() @ y.double()).to(_DTYPES[bits])


def _fake_matmul(x: Tensor, y: Tensor, bits: int) -> Tensor:
    return (x.float() @ y.float()).to(_DTYPES[bits])  # their dtypes may differ


Matmul = define_integer_op(
    "integer_matmul(Tensor x, Tensor y, int bits) -> Tensor", _matmul, _fake_matmul
)
"""The exact product of two integer matrices, or batches of them."""


def _convolution(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _convolve(x.double(), weight.double(), *rest)


def _fake_convolution(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _convolve(x.float(), weight.float(), *rest)


def _convolve(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    *geometry, bits = rest
    total: Tensor = _aten.convolution.default(x, weight, None, *geometry)
    return total.to(_DTYPES[bits])


Convolution = define_integer_op(
    "integer_convolution(Tensor x, Tensor weight, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation, bool is_transposed, SymInt[] output_padding, SymInt groups, int bits) "
    "-> Tensor",
    _convolution,
    _fake_convolution,
)
"""The exact convolution of integers, transposed too."""


def _group_linear(x: Tensor, weight: Tensor, multipliers: Tensor) -> Tensor:
    N, G = multipliers.shape
    grouped = x.double().reshape(*x.shape[:-1], G, -1)
    parts = torch.einsum("...gk,ngk->...ng", grouped, weight.double().reshape(N, G, -1))
    return (parts.to(torch.int64) * multipliers).sum(-1)


def _fake_group_linear(x: Tensor, weight: Tensor, multipliers: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.int64)


GroupLinear = define_integer_op(
    "integer_group_linear(Tensor x, Tensor weight, Tensor multipliers) -> Tensor",
    _group_linear,
    _fake_group_linear,
)
"""sum_g multipliers[n, g] * sum_k x[..., g, k] * weight[n, g, k]; an int32 sum each group."""


def _window_sum(x: Tensor, dim: int, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    sums = torch.cumsum(x, dim, dtype=torch.int64)
    sums = torch.cat([torch.zeros_like(sums.narrow(dim, 0, 1)), sums], dim)
    first, last = (torch.tensor(list(at), device=x.device) for at in (starts, ends))
    return sums.index_select(dim, last) - sums.index_select(dim, first)


def _fake_window_sum(x: Tensor, dim: int, starts: Sequence[int], ends: Sequence[int]) -> Tensor:
    shape = list(x.shape)
    shape[dim] = len(starts)
    return x.new_empty(shape, dtype=torch.int64)


WindowSum = define_integer_op(
    "integer_window_sum(Tensor x, int dim, int[] starts, int[] ends) -> Tensor",
    _window_sum,
    _fake_window_sum,
)
"""The sum of x[starts[i]:ends[i]] along one dimension, for each i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Windows:
    """The windows of a pool along one dimension.

    Attributes:
        starts: first index of each.
        ends: past its last index.
        counts: terms by which it divides; those in the padding may count.
    """

    starts: list[int]
    ends: list[int]
    counts: list[int]


def pool_windows(
    size: int, kernel: int, stride: int, padding: int, *, is_ceil: bool, counts_padding: bool
) -> Windows:
    """The windows of torch's average pools.

    >>> pool_windows(5, 2, 2, 0, is_ceil=True, counts_padding=True)
    Windows(starts=[0, 2, 4], ends=[2, 4, 5], counts=[2, 2, 1])
    """
    reach = size + 2 * padding - kernel
    count = (-(-reach // stride) if is_ceil else reach // stride) + 1
    if is_ceil and (count - 1) * stride >= size + padding:
        count -= 1  # the last window would begin in the padding on the right
    firsts = [i * stride - padding for i in range(count)]
    starts = [max(first, 0) for first in firsts]
    ends = [min(first + kernel, size) for first in firsts]
    padded = [min(first + kernel, size + padding) - first for first in firsts]
    valid = [end - start for start, end in zip(starts, ends, strict=True)]
    return Windows(starts=starts, ends=ends, counts=padded if counts_padding else valid)

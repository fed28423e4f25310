"""The layout in which a8w4_linear reads its weights, made from integers and undone to them.

K is cut in blocks of 2 h, where h is 32 for groups of 32 and 64 for others. A block is N x h
bytes, a channel's byte j holding k = j in its low half and k = h + j in its high half, in two's
complement. Four bytes are four int8 sixteen times too large after one shift and one mask (low) or
one mask (high), which the scale makes good: times 16 is exact, and so is scale / 16.

Groups of 32 and 64 are runs of h: a half each; groups of 128 and more, and whole rows, are runs of
128: a block each. A run is summed in int32 and then scaled. K is filled up with zeros.
"""

import torch
from torch import Tensor

from pt2e_quant.kernels.int4_linear.pack import check_group_size

__all__ = ["check_group_size", "half_of", "pack_halves", "run_of", "unpack_halves", "weight_sums"]


def half_of(group_size: int, K: int) -> int:
    """h, for a group size of K."""
    return 32 if group_size == 32 and group_size != K else 64


def run_of(group_size: int, K: int) -> int:
    """Return the number of k's summed in int32 before they are scaled: 32, 64 or 128."""
    return group_size if group_size in (32, 64) and group_size != K else 128


def pack_halves(weight: Tensor, half: int) -> Tensor:
    """Integers int8[N, K] from -8 to 7 as int8[ceil(K / 2 h), N, h].

    >>> pack_halves(torch.tensor([[1, -1]], dtype=torch.int8), 32)[0, 0, :3].tolist()
    [1, 15, 0]
    """
    N, K = weight.shape
    blocks = -(-K // (2 * half))
    padded = torch.nn.functional.pad(weight, (0, blocks * 2 * half - K))
    low, high = padded.view(N, blocks, 2, half).unbind(2)
    return ((low & 15) | (high << 4)).transpose(0, 1).contiguous()


def unpack_halves(packed: Tensor, K: int) -> Tensor:
    """The inverse of `pack_halves`: int8[N, K]."""
    blocks, N, half = packed.shape
    both = torch.stack([packed << 4 >> 4, packed >> 4], dim=2)
    return both.transpose(0, 1).reshape(N, blocks * 2 * half)[:, :K].contiguous()


def weight_sums(weight: Tensor, scale: Tensor, group_size: int) -> Tensor:
    """The sums of the rows of a weight int8[N, K], scaled: float32[N], rounded once.

    Args:
        weight: integers.
        scale: float[K / group_size, N].
        group_size: how many k's a scale is for.

    >>> weight_sums(torch.tensor([[1, 2, 3, -8]]), torch.tensor([[0.5], [2.0]]), 2)
    tensor([-8.5000])
    """
    N, K = weight.shape
    if not K:
        return torch.zeros(N, device=weight.device)
    sums = weight.view(N, -1, group_size).sum(2, dtype=torch.float64)
    return (sums * scale.t().to(torch.float64)).sum(1).to(torch.float32)

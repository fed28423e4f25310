"""Rounding to nearest or stochastic: up or down by chance, right on average."""

from enum import StrEnum

import torch
from torch import Tensor


class Rounding(StrEnum):
    """Rounding of a value between two codes to one of them."""

    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


def round_to_integers(x: Tensor, rounding: Rounding) -> Tensor:
    """Whole numbers in the dtype of x; nearest rounds ties to even."""
    if rounding is Rounding.NEAREST:
        return torch.round(x)
    return torch.floor(x + torch.rand_like(x))


def to_bfloat16(x: Tensor, rounding: Rounding) -> Tensor:
    """A float32 tensor in bfloat16; infinities and NaN stay what they are."""
    if rounding is Rounding.NEAREST:
        return x.to(torch.bfloat16)
    chance = torch.randint_like(x, 1 << 16, dtype=torch.int32)
    # The upper 16 bits are the bfloat16 below in magnitude; a carry out of the lower is one up.
    bits = (x.view(torch.int32) + chance) & -(1 << 16)
    return torch.where(x.isfinite(), bits.view(torch.float32), x).to(torch.bfloat16)

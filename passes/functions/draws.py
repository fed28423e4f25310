"""Random numbers, by the draws that ExecuTorch has kernels for: aten.rand and aten.randn."""

from typing import Any

import torch
from torch import Tensor


def rand_like(x: Tensor, **options: Any) -> Tensor:
    """Uniform numbers in [0, 1) of x's sizes."""
    return torch.rand(x.shape, dtype=options.get("dtype") or x.dtype)


def randn_like(x: Tensor, **options: Any) -> Tensor:
    """Normal numbers of x's sizes."""
    return torch.randn(x.shape, dtype=options.get("dtype") or x.dtype)


def bernoulli(x: Tensor, *, generator: None = None) -> Tensor:
    """1 with the probability that x has at each place, else 0."""
    return (rand_like(x) < x).to(x.dtype)


def dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """What is kept, scaled so that the mean stays, and the mask of it.

    ExecuTorch's kernel drops without scaling.
    """
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    if p == 1:
        return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
    mask = rand_like(x) >= p
    return x * mask.to(x.dtype) * (1 / (1 - p)), mask


def kept_by_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """What is kept, scaled so that the mean stays."""
    return dropout(x, p, train)[0]

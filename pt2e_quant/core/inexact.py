"""Tensors that are compared by how far they are apart: of floats, and of complex numbers."""

import torch
from torch import Tensor


def is_inexact(value: object) -> bool:
    """True if a value is a tensor of floats or of complex numbers."""
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def as_reals(value: Tensor) -> Tensor:
    """A tensor without a gradient, with the two parts of complex numbers in one more dimension."""
    value = value.detach()
    return torch.view_as_real(value.resolve_conj()) if value.is_complex() else value

"""Groups of qschemes: with one scale, with one for each channel, symmetric."""

import torch

PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
PER_CHANNEL = (
    torch.per_channel_affine,
    torch.per_channel_symmetric,
    torch.per_channel_affine_float_qparams,
)
SYMMETRIC = (torch.per_tensor_symmetric, torch.per_channel_symmetric)


def is_per_tensor(qscheme: torch.qscheme) -> bool:
    """True if a qscheme has one scale."""
    return qscheme in PER_TENSOR


def is_per_channel(qscheme: torch.qscheme) -> bool:
    """True if a qscheme has a scale for each channel."""
    return qscheme in PER_CHANNEL

"""Strides of constants, which runtimes read the order of axes from."""

import torch
from torch import Tensor


def has_plain_strides(tensor: Tensor) -> bool:
    """True if strides are those of a new tensor of that shape, also along axes of size 1.

    ExecuTorch refuses a sum of tensors whose axes are in different orders, and takes the sizes of
    a transposed [4, 1, 16] in the order of [1, 4, 16]. `is_contiguous` leaves axes of size 1 out.
    """
    return tensor.stride() == torch.empty(tensor.shape, device="meta").stride()

"""A layer norm that subtracts the mean before it squares, in operators that every runtime has.

Runtimes find a variance as the mean of squares less the square of the mean. Where the mean is some
hundred times the deviation, float32 has few digits left of that difference, or a negative one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """Less the mean, over the deviation. The mean of large numbers is rounded, hence the second."""
    apart = x - x.mean(dims, keepdim=True)
    apart = apart - apart.mean(dims, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    if weight is not None:
        x = x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    """Over the last dimensions."""
    dims = list(range(-len(normalized_shape), 0))
    return _affine(_normalized(x, dims, eps), weight, bias, normalized_shape)

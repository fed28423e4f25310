"""Norms that subtract the mean before they square, in operators that every runtime has.

Runtimes find a variance as the mean of squares less the square of the mean. Where the mean is some
hundred times the deviation, float32 has few digits left of that difference, or a negative one.

Norms in training move running statistics, which no schema says: runtimes leave them as they are.
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


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Over each channel of the batch; the running statistics that are given move towards its own.

    Args:
        x: [N, C, ...].
        weight: a factor of each channel.
        bias: of each channel.
        mean: the running mean of each channel, which is written.
        variance: the running variance of each channel, which is written.
        training: normalize by the batch's own statistics.
        momentum: the share of the batch's own in the statistics written.
        eps: added to the variance.
        cudnn_enabled: of GPUs.
    """
    return _trained(x, weight, bias, mean, variance, training, momentum, eps, by_image=False)


def instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
) -> Tensor:
    """As `batch_norm`, over each channel of each image; statistics move to the images' mean."""
    return _trained(x, weight, bias, mean, variance, use_input_stats, momentum, eps, by_image=True)


def _trained(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    *,
    by_image: bool,
) -> Tensor:
    if not training or (mean is None and variance is None):
        raise NotImplementedError("which runtimes take")
    dims = [*([] if by_image else [0]), *range(2, x.dim())]
    y = _affine(_normalized(x, dims, eps), weight, bias, [-1, *[1] * (x.dim() - 2)])
    found = (x.mean(dims), torch.var(x, dims, correction=1))
    for running, own in zip((mean, variance), found, strict=True):
        if running is not None:
            new = own.mean(0) if by_image else own
            running.copy_(running * (1 - momentum) + new * momentum)
    return y

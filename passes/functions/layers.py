"""Layers of networks in operators that every runtime has: norms, samples of volumes.

Norms subtract the mean before they square. Runtimes find a variance as the mean of squares less the
square of the mean. Where the mean is some hundred times the deviation, float32 has few digits left
of that difference, or a negative one. Norms in training write running statistics, which no schema
says: runtimes leave them as they are.

Samples of volumes are gathered.
"""

import functools
import math
import operator
from collections.abc import Sequence

import torch
from torch import Tensor


def _normalized(x: Tensor, dims: list[int], eps: float) -> Tensor:
    """(x - mean) / deviation. The mean is subtracted twice: that of large numbers is rounded."""
    apart = x - x.mean(dims, keepdim=True)
    apart = apart - apart.mean(dims, keepdim=True)
    return apart * torch.rsqrt((apart * apart).mean(dims, keepdim=True) + eps)


def affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, shape: Sequence[int]) -> Tensor:
    """Multiply by a norm's weight and add its bias, in a shape that broadcasts to x."""
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
    """Layer norm over the last dimensions."""
    dims = list(range(-len(normalized_shape), 0))
    return affine(_normalized(x, dims, eps), weight, bias, normalized_shape)


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
    """Batch norm in training; running statistics that are given move towards the batch's own.

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
    """Instance norm: `batch_norm` of each image; statistics move to the images' mean."""
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
    y = affine(_normalized(x, dims, eps), weight, bias, [-1, *[1] * (x.dim() - 2)])
    found = (x.mean(dims), torch.var(x, dims, correction=1))
    for running, own in zip((mean, variance), found, strict=True):
        if running is not None:
            new = own.mean(0) if by_image else own
            running.copy_(running * (1 - momentum) + new * momentum)
    return y


def sample_volumes(
    x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    """Values of volumes [N, C, D, H, W] at places [N, ..., 3], each -1 to 1 along W, H and D."""
    if interpolation_mode > 1 or padding_mode > 1:
        raise NotImplementedError("cubic samples, and reflected borders")
    is_nearest, has_border = interpolation_mode == 1, padding_mode == 1
    flat = x.flatten(2)
    corners: list[tuple[Tensor, Tensor]] = []
    for axis in (2, 1, 0):  # W, H and D, whose steps in a flat volume grow
        size, place = x.shape[2 + axis], grid[..., 2 - axis].flatten(1)
        place = (place + 1) / 2 * (size - 1) if align_corners else ((place + 1) * size - 1) / 2
        place = place.clamp(0.0, size - 1.0) if has_border else place
        low = place.round() if is_nearest else place.floor()
        ends = [(low, torch.ones_like(place))]
        if not is_nearest:
            ends = [(low, low + 1 - place), (low + 1, place - low)]
        inside = [(end, share * ((end >= 0) & (end < size)).to(x.dtype)) for end, share in ends]
        step = math.prod(x.shape[3 + axis :])
        mine = [(end.clamp(0, size - 1).to(torch.int64) * step, share) for end, share in inside]
        corners = [(a + b, p * q) for a, p in corners for b, q in mine] if corners else mine
    parts = [
        flat.gather(2, index.unsqueeze(1).expand(-1, x.shape[1], -1)) * share.unsqueeze(1)
        for index, share in corners
    ]
    total = functools.reduce(operator.add, parts)
    return total.reshape(x.shape[0], x.shape[1], *grid.shape[1:4])

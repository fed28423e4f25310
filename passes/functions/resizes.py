"""Resizing and pooling of images: a product with a matrix along each axis, or a convolution.

ONNX Runtime's cubic Resize finds each value by itself, which takes 4 to 56 times as long
(`benchmarks/onnx_resizes.py`).
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

_SMALL_MATRIX = 2**14
_LARGEST_MATRIX = 2**20
"""Elements of an axis' matrix: up to the first products are faster than a convolution, beyond the
second a file would grow by megabytes."""
_CUBIC = -0.75
"""Keys' a of torch's bicubic resizing, which with anti-aliasing is -0.5."""
_REACH = 2
"""Pixels on each side that a bicubic value is found from."""
_LARGEST_FACTOR = 8


def triangle(x: Tensor) -> Tensor:
    """The filter of bilinear resizing."""
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor, a: float = -0.5) -> Tensor:
    """The filter of bicubic resizing, with Keys' a."""
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def lanczos(x: Tensor) -> Tensor:
    """The windowed sinc with three lobes on each side."""
    return torch.where(x.abs() < 3, _sinc(x) * _sinc(x / 3), 0.0)


def _sinc(x: Tensor) -> Tensor:
    angle = x * math.pi
    return torch.where(angle == 0, 1.0, torch.sin(angle) / torch.where(angle == 0, 1.0, angle))


def antialiased(
    kernel: Callable[[Tensor], Tensor], *, by_axis: bool = False
) -> Callable[..., Tensor]:
    """`_upsample_…2d_aa.vec` with the filter that a kernel gives for distances in pixels.

    Each result is the mean of the pixels near it, weighted by the kernel, whose width grows with
    the reduction: the same for all pixels of a column and of a row.

    Args:
        kernel: of distances, in pixels of the coarser grid.
        by_axis: `.default` instead, which takes a factor an axis.
    """

    def resize(
        x: Tensor,
        output_size: Sequence[int] | None,
        align_corners: bool,
        *factors: Any,
    ) -> Tensor:
        given = factors if by_axis else (factors[0] if factors else None)
        scales = given or (None, None)
        ends = _ends(x, output_size, given)
        rows, columns = (
            _weights(kernel, size, end, _step(size, end, align_corners, scale)).to(x)
            for size, end, scale in zip(x.shape[2:], ends, scales, strict=True)
        )
        return along(along(x, -1, columns), -2, rows)

    return resize


def _step(size: int, end: int, align_corners: bool, factor: float | None) -> Tensor:
    """The distance of two results, in pixels of the input; float32, as torch has it.

    A tensor also where sizes are known: ExecuTorch has no operator of a tensor and a dynamic size.
    """
    if factor and not align_corners:
        return torch.scalar_tensor(1 / factor)
    whole, cut = (torch.scalar_tensor(count) for count in (size, end))
    if align_corners:
        return (whole - 1) / (cut - 1).clamp(min=1) * (cut > 1)
    return whole / cut


def _weights(kernel: Callable[[Tensor], Tensor], size: int, end: int, step: Tensor) -> Tensor:
    """float32[end, size], with rows whose sum is 1."""
    centers = (torch.arange(end, dtype=torch.float32) + 0.5) * step
    pixels = torch.arange(size, dtype=torch.float32) + 0.5
    found = kernel((pixels - centers.unsqueeze(-1)) / step.clamp(min=1))
    return found / found.sum(-1, keepdim=True)


def bicubic(
    x: Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Tensor:
    """`upsample_bicubic2d.vec`: images, where a pixel beyond an edge is the one at the edge.

    Small images and factors that are no whole numbers take a matrix for each axis, the others
    `bicubic_between_pixels`.
    """
    if not x.is_floating_point():
        raise NotImplementedError("integers, which are rounded")
    sizes, ends = x.shape[2:], _ends(x, output_size, scale_factors)
    scales = scale_factors or (None, None)
    most = max(_elements(size, end) for size, end in zip(sizes, ends, strict=True))
    if most > _SMALL_MATRIX and x.dtype is torch.float32 and not align_corners:
        factor = _whole_factor(sizes, ends, scale_factors)
        if factor is not None:
            return _between_pixels(x, factor)
    if _LARGEST_MATRIX < most < math.inf:
        raise NotImplementedError("large matrices")
    for dim, size, end, scale in zip((-2, -1), sizes, ends, scales, strict=True):
        step = _step(size, end, align_corners, scale)
        places = torch.arange(end, dtype=torch.float32)
        centers = places * step if align_corners else (places + 0.5) * step - 0.5
        x = along(x, dim, _cubic_weights(centers, size).to(x))
    return x


def bicubic_between_pixels(
    x: Tensor,
    output_size: Sequence[int] | None,
    align_corners: bool,
    scale_factors: Sequence[float] | None = None,
) -> Tensor:
    """`upsample_bicubic2d.vec` by a whole factor, of images of any size.

    The results between two pixels have the same weights everywhere: a convolution gives each of
    them as a channel.
    """
    ends = _ends(x, output_size, scale_factors)
    factor = None if align_corners else _whole_factor(x.shape[2:], ends, scale_factors)
    if factor is None or x.dtype is not torch.float32:
        raise NotImplementedError("weights that depend on the place")
    return _between_pixels(x, factor)


def _ends(
    x: Tensor, output_size: Sequence[int] | None, scales: Sequence[float] | None
) -> Sequence[int]:
    if output_size is not None:
        return output_size
    assert scales is not None, "the operator takes sizes or factors"
    return [math.floor(size * scale) for size, scale in zip(x.shape[2:], scales, strict=True)]


def _elements(size: int, end: int) -> float:
    """Of an axis' matrix; infinitely many where they are known at run time."""
    return size * end if isinstance(size, int) and isinstance(end, int) else math.inf


def _whole_factor(
    sizes: Sequence[int], ends: Sequence[int], scales: Sequence[float] | None
) -> int | None:
    """The whole number that multiplies both axes, None if there is none."""
    for factor in range(2, _LARGEST_FACTOR + 1):
        pairs = zip(sizes, ends, strict=True)
        if scales is not None:
            if all(scale == factor for scale in scales):
                return factor
        elif all(statically_known_true(size * factor == end) for size, end in pairs):
            return factor
    return None


def _between_pixels(x: Tensor, factor: int) -> Tensor:
    batch, channels, height, width = x.shape
    places = (torch.arange(factor, dtype=torch.float32) + 0.5) / factor - 0.5
    taps = torch.arange(-_REACH, _REACH + 1, dtype=torch.float32)
    weights = cubic(places.unsqueeze(-1) - taps, _CUBIC)  # [factor, taps]
    filters = weights[:, None, :, None] * weights[None, :, None, :]
    images = x.reshape(batch * channels, 1, height, width)
    images = torch.ops.aten.replication_pad2d.default(images, [_REACH] * 4)
    made = F.conv2d(images, filters.reshape(factor * factor, 1, *[2 * _REACH + 1] * 2))
    return F.pixel_shuffle(made, factor).reshape(batch, channels, height * factor, width * factor)


def _cubic_weights(centers: Tensor, size: int) -> Tensor:
    """float32[end, size]: of the four pixels around each center; those outside are at the edge."""
    taps = centers.floor().unsqueeze(-1) + torch.arange(1 - _REACH, 1 + _REACH)
    weights = cubic(taps - centers.unsqueeze(-1), _CUBIC)
    pixels = torch.arange(size, dtype=torch.float32)
    taps = taps.clamp(0, size - 1)
    each = [
        torch.where(taps[:, k : k + 1] == pixels, weights[:, k : k + 1], 0.0)
        for k in range(2 * _REACH)
    ]
    return functools.reduce(operator.add, each)


def along(x: Tensor, dim: int, weights: Tensor) -> Tensor:
    """Multiply an axis, counted from the last, by weights [end, size]."""
    if dim == -1:
        return x @ weights.mT
    made = weights @ x.flatten(dim + 1)
    return made.reshape(*made.shape[:-1], *x.shape[dim + 1 :])


def adaptive_avg_pool(x: Tensor, output_size: Sequence[int]) -> Tensor:
    """Means of windows, as one product with a matrix for each dimension.

    For windows that are not all of one size, or of sizes known at run time, and those of volumes:
    ONNX has the mean over the whole volume alone.
    """
    sizes = x.shape[-len(output_size) :]
    if any(isinstance(size, int) and size == 0 for size in output_size):
        return x.new_zeros((*x.shape[: -len(output_size)], *output_size))
    if all(isinstance(n, int) and n == 1 for n in output_size):
        raise NotImplementedError("means over all")
    pairs = list(zip(sizes, output_size, strict=True))
    most = max(_elements(size, count) for size, count in pairs)
    is_even = most < math.inf and all(size % count == 0 for size, count in pairs)
    if len(output_size) < 3 and (is_even or _LARGEST_MATRIX < most < math.inf):
        raise NotImplementedError("windows that runtimes take")
    for dim, count in enumerate(output_size, start=-len(output_size)):
        size = x.shape[dim]
        window, place = torch.arange(count).unsqueeze(-1), torch.arange(size)
        # No quotient: place is in a window if it ends behind its start and starts before its end.
        is_in = ((place + 1) * count > window * size) & (place * count < (window + 1) * size)
        is_in_float = is_in.to(x.dtype)
        x = along(x, dim, is_in_float / is_in_float.sum(-1, keepdim=True))
    return x

"""The values that a quantized tensor can have."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.formats.blocks import spread
from pt2e_quant.core.qparams import QParams


class Declined(Exception):
    """Why an algorithm does nothing at a site."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The values that a tensor can have: (q - zero_point) * scale for integers q in a range.

    Args:
        scale: of the tensor's shape, as zero_point.
        zero_point: the integer that stands for 0.0.
        quant_min: least integer.
        quant_max: greatest integer.
    """

    scale: Tensor
    zero_point: Tensor
    quant_min: int
    quant_max: int

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest values, float32."""
        codes = (x / self.scale).round_().add_(self.zero_point)
        return codes.clamp_(self.quant_min, self.quant_max).sub_(self.zero_point).mul_(self.scale)

    def __getitem__(self, index: int) -> "Grid":
        """The grid of one index of the first axis."""
        return replace(self, scale=self.scale[index], zero_point=self.zero_point[index])

    def scaled(self, factor: float | Tensor) -> "Grid":
        """The grid with its scales multiplied."""
        return replace(self, scale=self.scale * factor)

    def change(self, view: Callable[[Tensor], Tensor]) -> "Grid":
        """The grid of a tensor that a view is taken of."""
        return replace(self, scale=view(self.scale), zero_point=view(self.zero_point))


def scale_of(qparams: QParams | BlockQParams) -> Tensor:
    """The scales in force, float32: of the tensor, its channels or groups, or its blocks."""
    if not isinstance(qparams, BlockQParams):
        return qparams.scale
    assert qparams.scale is not None  # integers have scales
    return qparams.scale.real()


def grid_of(qparams: QParams | BlockQParams, value: Tensor) -> Grid:
    """The grid of a tensor quantized by qparams.

    Raises:
        Declined: its integers stand for no multiples of a scale.
    """
    scale, zero_point = scale_of(qparams), qparams.zero_point
    if zero_point is None:
        zero_point = torch.zeros_like(scale, dtype=torch.int32)
    if zero_point.is_floating_point():
        raise Declined("its zero_points are no integers")
    if isinstance(qparams, BlockQParams):
        limits = qparams.scheme.range
    else:
        limits = qparams.quant_min, qparams.quant_max
    scale, zero_point = (spread_over(given, qparams, value) for given in (scale, zero_point))
    return Grid(scale, zero_point, *limits)


def spread_over(given: Tensor, qparams: QParams | BlockQParams, value: Tensor) -> Tensor:
    """Numbers shaped like the scales of qparams, at each element of a tensor quantized by them."""
    if isinstance(qparams, BlockQParams):
        return spread(given.float(), value.shape, qparams.block).expand_as(value)
    if qparams.group_size is not None:
        return given.float().repeat_interleave(qparams.group_size, 1)
    shape = [1] * value.dim()
    if qparams.axis is not None:
        shape[qparams.axis] = -1
    return given.float().reshape(shape).expand_as(value)

"""Qparams that were read from a file: nothing is observed."""

import torch
from torch import Tensor

from pt2e_quant.observers.base import ObserverBase


class ImportedQParams(ObserverBase):
    """Gives the qparams it was made with, per tensor, channel or group.

    Args:
        scale: float32[1], [C], or [rows, groups]: real units per integer step.
        zero_point: int32, shaped like scale.
        dtype: integer dtype to quantize to.
        qscheme: per tensor or per channel, affine or symmetric.
        quant_min: least integer used.
        quant_max: greatest integer used.
        ch_axis: the axis of the channels where the scheme is per channel.
        group_size: how many neighbours of a row share a scale, None if they are not in groups.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: Tensor,
        zero_point: Tensor,
        *,
        dtype: torch.dtype,
        qscheme: torch.qscheme,
        quant_min: int | None,
        quant_max: int | None,
        ch_axis: int = 0,
        group_size: int | None = None,
    ) -> None:
        super().__init__(dtype)
        self.qscheme = qscheme
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.ch_axis = ch_axis
        self.group_size = group_size
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)

    @property
    def seen(self) -> bool:
        """It needs no data."""
        return True

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale and zero_point of the file."""
        return self.scale, self.zero_point

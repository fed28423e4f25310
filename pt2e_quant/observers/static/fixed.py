"""The observer of qparams that are known beforehand."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.base import ObserverBase


class FixedQParamsObserver(ObserverBase):
    """Gathers nothing and gives the qparams it was made with.

    Args:
        scale: real units per integer step.
        zero_point: the integer that stands for 0.0.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        quant_min: least integer used.
        quant_max: greatest integer used.
        is_dynamic: must be False.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(
        self,
        scale: float,
        zero_point: int,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        quant_min: int = 0,
        quant_max: int = 255,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        if is_dynamic:
            raise ConfigError("fixed qparams cannot be dynamic")
        super().__init__(dtype=dtype, is_dynamic=is_dynamic, **kwargs)
        if not info(dtype).holds(quant_min, quant_max) or not 0.0 < scale < torch.inf:
            raise ConfigError(
                f"fixed qparams need a positive scale and a range within {dtype}, found scale "
                f"{scale} and quant_min {quant_min} .. quant_max {quant_max}"
            )
        self.qscheme = qscheme
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.register_buffer("scale", torch.tensor([scale], dtype=torch.float32))
        self.register_buffer("zero_point", torch.tensor([zero_point], dtype=torch.int32))

    def forward(self, X: Tensor) -> Tensor:
        """Return X."""
        return X

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The fixed scale and zero_point, both [1]."""
        return self.scale, self.zero_point

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"scale={self.scale.item()}, zero_point={self.zero_point.item()}"


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

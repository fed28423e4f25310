"""The exponential moving average of each batch's min and max, per tensor or per channel."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import UniformQuantizationObserverBase
from pt2e_quant.observers.static.minmax import (
    MinMaxObserver,
    PerChannelMinMaxObserver,
    channel_range,
    start_channels,
    tensor_range,
)


def average_range(
    observer: UniformQuantizationObserverBase, low: Tensor, high: Tensor, constant: float
) -> None:
    """Move the observer's range towards [low, high] by the share constant, in place.

    The first data replaces the initial (inf, -inf); a batch of which all is masked comes as
    (inf, -inf) and changes nothing. No branch on values: that would wait for the device.
    """
    running = (observer.min_val, observer.max_val)
    current = (low.to(running[0]), high.to(running[1]))
    unseen = (running[0] == torch.inf) & (running[1] == -torch.inf)
    is_empty = current[0] > current[1]
    for old, new in zip(running, current, strict=True):
        moved = torch.where(unseen, new, old + constant * (new - old))
        old.copy_(torch.where(is_empty, old, moved))


class MovingAverageMinMaxObserver(MinMaxObserver):
    """The moving average of the min and max of each batch.

    Args:
        averaging_constant: weight of the newest batch.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        eps: the least scale.
        is_dynamic: qparams are computed at run time; needs averaging_constant 1.
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        if is_dynamic and averaging_constant != 1:
            raise ConfigError(
                f"a dynamic moving average needs averaging_constant=1, found {averaging_constant}"
            )
        super().__init__(
            dtype=dtype,
            qscheme=qscheme,
            reduce_range=reduce_range,
            quant_min=quant_min,
            quant_max=quant_max,
            eps=eps,
            is_dynamic=is_dynamic,
            **kwargs,
        )
        self.averaging_constant = averaging_constant

    def forward(self, x_orig: Tensor) -> Tensor:
        """Move the running range towards that of x_orig; returns x_orig."""
        x = self.observable(x_orig)
        if x is not None:
            low, high = tensor_range(x, self.ignore_at_or_below)
            average_range(self, low, high, self.averaging_constant)
        return x_orig


class MovingAveragePerChannelMinMaxObserver(PerChannelMinMaxObserver):
    """The moving average of each channel's min and max of each batch.

    Args:
        averaging_constant: weight of the newest batch.
        ch_axis: the axis of the channels.
        dtype: integer dtype to quantize to.
        qscheme: per_channel_affine, per_channel_symmetric or per_channel_affine_float_qparams.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        eps: the least scale.
        is_dynamic: must be False.
    """

    def __init__(
        self,
        averaging_constant: float = 0.01,
        ch_axis: int = 0,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_channel_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            ch_axis=ch_axis,
            dtype=dtype,
            qscheme=qscheme,
            reduce_range=reduce_range,
            quant_min=quant_min,
            quant_max=quant_max,
            eps=eps,
            is_dynamic=is_dynamic,
            **kwargs,
        )
        self.averaging_constant = averaging_constant

    def forward(self, x_orig: Tensor) -> Tensor:
        """Move each channel's running range towards that of x_orig; returns x_orig."""
        x = self.observable(x_orig)
        if x is not None:
            low, high = channel_range(x, self.ch_axis, self.ignore_at_or_below)
            start_channels(self, low)
            average_range(self, low, high, self.averaging_constant)
        return x_orig

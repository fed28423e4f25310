"""Fake-quantize and the moving average of its range in one operator: one pass over the data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.fake_quantize import FakeQuantize
from pt2e_quant.observers.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.qschemes import SYMMETRIC

__all__ = ["FusedMovingAvgObsFakeQuantize"]


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """What FakeQuantize gives with a moving-average observer, by torch's fused operator.

    The flags are read inside the operator: nothing waits for the device, and torch.compile sees
    no branch.

    Args:
        observer: makes a MovingAverageMinMaxObserver or its per-channel form.
        quant_min: least integer used.
        quant_max: greatest integer used.
        observer_kwargs: further arguments of the observer.

    Raises:
        ConfigError: the observer keeps no moving average.
    """

    def __init__(
        self,
        observer: Callable[..., Any] = MovingAverageMinMaxObserver,
        quant_min: int = 0,
        quant_max: int = 255,
        **observer_kwargs: Any,
    ) -> None:
        super().__init__(observer, quant_min, quant_max, **observer_kwargs)
        made = self.activation_post_process
        if not hasattr(made, "averaging_constant") or not hasattr(made, "min_val"):
            raise ConfigError(
                "FusedMovingAvgObsFakeQuantize needs a moving-average min/max observer, found "
                f"{type(made).__name__}",
                fix="use FakeQuantize",
            )
        # The operator takes flags of 64 bits.
        self.register_buffer("fake_quant_enabled", torch.tensor([1], dtype=torch.long))
        self.register_buffer("observer_enabled", torch.tensor([1], dtype=torch.long))
        self.is_symmetric_quant = self.qscheme in SYMMETRIC

    def forward(self, X: Tensor) -> Tensor:
        """Observe X and return it quantized and dequantized, as far as enabled."""
        observer = self.activation_post_process
        return torch.fused_moving_avg_obs_fake_quant(
            X,
            observer_on=self.observer_enabled,
            fake_quant_on=self.fake_quant_enabled,
            running_min=observer.min_val,
            running_max=observer.max_val,
            scale=self.scale,
            zero_point=self.zero_point,
            averaging_const=observer.averaging_constant,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            ch_axis=self.ch_axis,
            per_row_fake_quant=self.is_per_channel,
            symmetric_quant=self.is_symmetric_quant,
        )

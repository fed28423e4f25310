"""Fake-quantize and the moving average of its range in one operator: one pass over the data."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.recomputation import is_recomputing
from pt2e_quant.observers.qschemes import SYMMETRIC
from pt2e_quant.observers.static.minmax import channel_range
from pt2e_quant.observers.static.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.training.fake_quantize import FakeQuantize
from pt2e_quant.observers.training.fake_quantize_function import is_on_fast_path


class FusedMovingAvgObsFakeQuantize(FakeQuantize):
    """FakeQuantize with a moving-average observer, by torch's fused operator.

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
        is_new = self.is_per_channel and self.activation_post_process.min_val.numel() == 0
        if is_new and torch.compiler.is_compiling():  # the operator would resize its arguments
            self.start_channels(X.shape[self.ch_axis])
        if X.dtype is torch.float32 and not is_on_fast_path(X):
            return self._fused(X, self.ch_axis)
        with torch.no_grad():
            # The operator moves the range and computes the scale: the range is all it need see.
            self._fused(self._ends(X).float(), 0)
        if torch.compiler.is_compiling():
            return torch.where(self.fake_quant_enabled[0] == 1, self.quantized(X), X)
        return X if self.fake_quant_enabled[0] != 1 else self.quantized(X)

    def _ends(self, X: Tensor) -> Tensor:
        """The least and greatest values, [C, 2]; zeros if the observer is off."""
        if not torch.compiler.is_compiling() and not self.is_observing:
            return torch.zeros(max(1, self.activation_post_process.min_val.numel()), 2)
        if self.is_per_channel:
            return torch.stack(channel_range(X, self.ch_axis), 1)
        return torch.stack(torch.aminmax(X)).reshape(1, 2)

    def _fused(self, X: Tensor, axis: int) -> Tensor:
        observer, is_on = self.activation_post_process, self.observer_enabled
        return torch.fused_moving_avg_obs_fake_quant(
            X,
            observer_on=torch.zeros_like(is_on) if is_recomputing() else is_on,
            fake_quant_on=self.fake_quant_enabled,
            running_min=observer.min_val,
            running_max=observer.max_val,
            scale=self.scale,
            zero_point=self.zero_point,
            averaging_const=observer.averaging_constant,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            ch_axis=axis,
            per_row_fake_quant=self.is_per_channel,
            symmetric_quant=self.is_symmetric_quant,
        )

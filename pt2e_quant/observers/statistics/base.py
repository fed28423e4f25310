"""The base class of statistics: modules that watch a tensor for an algorithm and give no qparams.

Observers find the qparams of the tensors that are quantized. Statistics are gathered beside them,
also on tensors that stay float; prepare adds them and convert takes them out again.
"""

from abc import ABC, abstractmethod
from typing import Self

import torch
from torch import Tensor, nn


class Statistics(nn.Module, ABC):
    """Gathers what an algorithm needs to know of one tensor during calibration."""

    _is_impure = True
    """Tells torch.fx to keep the call, whose result nothing reads."""

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Take x into the statistics; returns x itself."""

    @property
    @abstractmethod
    def seen(self) -> bool:
        """True if any data has come in."""

    @property
    def is_finite(self) -> bool:
        """True if no NaN came in, as far as sums that are kept tell.

        Squares of finite values may add up to an infinity: what cannot use such sums declines.
        """
        sums = (buffer for buffer in self.buffers() if buffer.is_floating_point())
        return not any(bool(torch.isnan(buffer).any()) for buffer in sums)

    @abstractmethod
    def scaled(self, factors: Tensor) -> Self:
        """The statistics that the tensor would have had with its channels multiplied.

        Args:
            factors: [C], not 0.
        """

    @property
    def settings(self) -> object:
        """Equal for modules of one class that gather the same from the same tensor."""
        return None

    def is_like(self, other: "Statistics") -> bool:
        """True if another module gathers the same, so that one does for both."""
        return type(self) is type(other) and self.settings == other.settings

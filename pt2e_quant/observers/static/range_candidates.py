"""Ranges that a tensor could be quantized over, and an observer of the one that was chosen."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import squared_errors
from pt2e_quant.observers.static.percentile import PercentileObserver

SQUARED = "squared error"
PERCENTILES = (99.999, 99.99, 99.9)
_SHARES = torch.exp2(-torch.arange(10, dtype=torch.float64) / 6)
"""Of an end of the observed range, down to a third."""


class RangeCandidates(PercentileObserver):
    """A histogram, and the ranges that different rules find in it."""

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest value of each candidate, by the name of its rule."""
        found = {SQUARED: self._least_squares()}
        for percentile in PERCENTILES:
            self.percentile = percentile
            found[f"{percentile:g} %"] = self.optimal_range()
        return {name: (low.item(), high.item()) for name, (low, high) in found.items()}

    def _least_squares(self) -> tuple[Tensor, Tensor]:
        """The least squared error among a few shares of each end.

        Each candidate is judged by what it costs its readers: the last percent of this error, for
        which `MSEObserver` takes ten times as long, decides nothing.
        """
        whole = torch.stack([self.min_val.clamp(max=0.0), self.max_val.clamp(min=0.0)]).double()
        if self.is_symmetric:
            reach = whole.abs().max()
            low, high = -reach * _SHARES, reach * _SHARES
        else:
            low, high = torch.cartesian_prod(*(end * _SHARES for end in whole.cpu())).T
        scale, zero_point = self._choose(low.float(), high.float())
        errors = squared_errors(
            self.binned_data(), scale, zero_point, self.quant_min, self.quant_max
        )
        best = int(errors.argmin())
        return low[best], high[best]


class ChosenRangeObserver(MinMaxObserver):
    """A range that was chosen after calibration, beside the one that was seen.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        **kwargs: as of `MinMaxObserver`.
    """

    def __init__(self, dtype: torch.dtype, qscheme: torch.qscheme, **kwargs: Any) -> None:
        super().__init__(dtype, qscheme, **kwargs)
        self.chosen = (0.0, 0.0)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the chosen range, both [1]."""
        low, high = (self.min_val.new_tensor(end) for end in self.chosen)
        return self.qparams_of(low, high)

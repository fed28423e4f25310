"""The range that holds a given share of everything seen."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.static.mse import MSEObserver


class PercentileObserver(MSEObserver):
    """Clips the outermost elements: half of their share at each end, by magnitude if symmetric.

    The statistics are those of MSEObserver; only the choice of the range from them differs.

    Args:
        percentile: share of the elements that lie within the range, in percent.
        bins: number of bins.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        **kwargs: as of `UniformQuantizationObserverBase`; is_dynamic must be False.
    """

    def __init__(
        self,
        percentile: float = 99.99,
        bins: int = 8192,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        **kwargs: Any,
    ) -> None:
        super().__init__(bins, dtype, qscheme, **kwargs)
        if not 0.0 < percentile <= 100.0:
            raise ConfigError(f"percentile must be above 0 and at most 100, found {percentile}")
        self.percentile = percentile

    def optimal_range(self) -> tuple[Tensor, Tensor]:
        """The low and high end that keep the share, float32 without axes."""
        data = self.binned_data()
        edges, counts = data.edges, data.counts.clone()
        zeros = float(self.zero_count.item())
        share = self.percentile / 100.0
        if self.is_symmetric:
            high = _magnitude(edges, counts, zeros, share)
            low = -high
        else:
            cut = (1.0 - share) / 2
            low = _quantile(edges, counts, zeros, cut)
            high = -_quantile(-edges.flip(0), counts.flip(0), zeros, cut)
        return torch.tensor(low).to(self.min_val), torch.tensor(high).to(self.max_val)


def _quantile(edges: Tensor, counts: Tensor, zeros: float, share: float) -> float:
    """The value that the given share lies below; evenly spread in each bin, zeros at 0.0."""
    below = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    wanted = share * (float(below[-1]) + zeros)
    at_zero = _interpolate(edges, below, 0.0)
    if zeros and at_zero < wanted <= at_zero + zeros:
        return 0.0
    wanted -= zeros if wanted > at_zero else 0.0
    return _interpolate(below, edges, wanted)


def _magnitude(edges: Tensor, counts: Tensor, zeros: float, share: float) -> float:
    """The magnitude that the given share does not exceed."""
    ends = torch.unique(torch.cat([edges.abs(), torch.zeros(1, dtype=torch.float64)]))
    below = torch.cat([torch.zeros(1, dtype=torch.float64), counts.cumsum(0)])
    within = torch.tensor(
        [_interpolate(edges, below, float(e)) - _interpolate(edges, below, -float(e)) for e in ends]
    ).to(torch.float64)
    wanted = share * (float(below[-1]) + zeros) - zeros
    return 0.0 if wanted <= 0.0 else _interpolate(within, ends, wanted)


def _interpolate(xs: Tensor, ys: Tensor, x: float) -> float:
    """The line through the points at x; xs never fall, and the ends go on level."""
    if x <= float(xs[0]):
        return float(ys[0])
    if x >= float(xs[-1]):
        return float(ys[-1])
    i = int(torch.searchsorted(xs, x, right=True))
    left, right = float(xs[i - 1]), float(xs[i])
    part = (x - left) / (right - left) if right > left else 0.0
    return float(ys[i - 1]) + part * (float(ys[i]) - float(ys[i - 1]))

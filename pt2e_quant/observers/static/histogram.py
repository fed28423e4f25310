"""A histogram of everything seen, and the range in it that costs the least squared error.

The bins, the way they are combined and the search give what HistogramObserver of torch.ao gives,
bit for bit, but NaN and infinity are refused where upstream leaves them out with a warning.
"""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR, UniformQuantizationObserverBase
from pt2e_quant.observers.static.count_bins import count_bins
from pt2e_quant.observers.static.range_search import least_squares_range

__all__ = ["HistogramObserver"]

_UPSAMPLE_RATE = 16
"""Each old bin is cut into so many before it is moved to new bins."""


class HistogramObserver(UniformQuantizationObserverBase):
    """The histogram between the least and greatest value seen.

    Args:
        bins: number of bins.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        factory_kwargs: device and dtype of the statistics.
        eps: the least scale.
        is_dynamic: must be False.
    """

    histogram: Tensor

    def __init__(
        self,
        bins: int = 2048,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        reduce_range: bool = False,
        quant_min: int | None = None,
        quant_max: int | None = None,
        factory_kwargs: dict[str, Any] | None = None,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dtype, qscheme, reduce_range, quant_min, quant_max, factory_kwargs, eps, is_dynamic,
            **kwargs,
        )  # fmt: skip
        self.require_qscheme(PER_TENSOR)
        self.require_static()
        self.bins = bins
        self.dst_nbins = 1 << limits_of(dtype).bits
        self.upsample_rate = _UPSAMPLE_RATE
        self.register_buffer("histogram", torch.zeros(bins, **self.factory_kwargs))
        self.register_buffer("min_val", torch.tensor(torch.inf, **self.factory_kwargs))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **self.factory_kwargs))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Add the elements of x_orig to the histogram; returns x_orig.

        Raises:
            NonFinite: if x_orig holds NaN or infinity.
        """
        x = self.observable(x_orig)
        if x is not None and self.ignore_at_or_below is not None:
            x = x[~(x <= self.ignore_at_or_below)]
        if x is not None and x.numel() > 0:
            self._add(x)
        return x_orig

    def _add(self, x: Tensor) -> None:
        old = (self.min_val.item(), self.max_val.item())
        low, high = self.widened_range(x, *old)
        counts = counts_between(x, self.bins, low, high)
        if old == (low, high):
            self.histogram += counts
            return
        added = counts.to(self.histogram)
        if old[0] <= old[1]:
            added += rebin(self.histogram, self.min_val, self.max_val, low, high)
        self.histogram.copy_(added)
        self.min_val.fill_(low)
        self.max_val.fill_(high)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the range with the least squared error, both [1]."""
        if not self.seen:
            return self.qparams_of(self.min_val, self.max_val)
        low, high = least_squares_range(
            self.histogram, self.min_val, self.max_val, levels=self.dst_nbins
        )
        return self.qparams_of(low, high)

    def reset_min_max_vals(self) -> None:
        """Forget all statistics."""
        self._observed_once = False
        self.histogram.zero_()
        self.min_val.fill_(torch.inf)
        self.max_val.fill_(-torch.inf)


def counts_between(x: Tensor, bins: int, low: float, high: float) -> Tensor:
    """count_bins, also for a range of one value: histc then counts in [value - 1, value + 1]."""
    if low == high:
        low, high = low - 1.0, high + 1.0
        if float(torch.tensor(high) - torch.tensor(low)) == 0.0:
            # Too great for float32 to add 1 to: histc has no bins left to count in.
            counts = torch.zeros(bins, dtype=torch.int64, device=x.device)
            counts[bins // 2] = x.numel()
            return counts
    return count_bins(x, bins, low, high)


def rebin(histogram: Tensor, old_low: Tensor, old_high: Tensor, low: float, high: float) -> Tensor:
    """A histogram over [old_low, old_high] moved to as many bins over the wider [low, high].

    Each old bin is cut into equal parts, and each part goes to the new bin that holds its middle.
    """
    bins = histogram.numel()
    if old_low == old_high:
        one = counts_between(old_low, bins, low, high).to(histogram)
        return one * histogram.sum()
    parts = bins * _UPSAMPLE_RATE
    device = histogram.device
    starts = torch.linspace(old_low.item(), old_high.item(), parts + 1, device=device)[:-1]
    middles = starts + 0.5 * ((old_high - old_low) / parts)
    edges = torch.linspace(low, high, bins + 1, device=device)
    # Both rise, so it takes one search for each edge, not for each middle. What rounding moved
    # beyond the outer edges stays in the outer bins; cummax: linspace may fall by its last bit.
    cuts = torch.searchsorted(middles, edges).cummax(0).values
    cuts[0], cuts[-1] = 0, parts
    target = torch.repeat_interleave(
        torch.arange(bins, device=device), cuts.diff(), output_size=parts
    )
    weights = histogram.repeat_interleave(_UPSAMPLE_RATE) / _UPSAMPLE_RATE
    return torch.bincount(target, weights=weights, minlength=bins).to(histogram)

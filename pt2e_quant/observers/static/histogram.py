"""A histogram of everything seen, and the range in it that costs the least squared error.

The bins, the way they are combined and the search give what HistogramObserver of torch.ao gives,
bit for bit, but NaN and infinity are refused where upstream leaves them out with a warning.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR
from pt2e_quant.observers.observe_whole import WholeObserver
from pt2e_quant.observers.static.count_bins import count_bins

_STEP = 1e-5


@lru_cache(maxsize=1)
def _shares() -> tuple[list[float], list[float]]:
    """After n steps: the share of the mass given up below, and the share kept below the top.

    Upstream adds and subtracts the step again and again in float64, with each rounding; so here.
    """
    steps = np.full(round(1 / _STEP) + 2, _STEP)
    steps[0] = 0.0
    below = np.cumsum(steps)
    steps[0] = -1.0
    return below.tolist(), np.cumsum(-steps).tolist()


def _moves(histogram: Tensor) -> Iterator[tuple[int, int]]:
    """The (first bin, last bin) after each step that moves one of them, if nothing stops it."""
    mass: list[float] = torch.cumsum(histogram, dim=0).tolist()
    total = torch.sum(histogram).item()
    below, top = _shares()

    def high_mass(n: int) -> float:
        return float(np.float32(top[n] * total))  # upstream compares in float32

    first, last = 0, len(mass) - 1
    i = j = 0
    while below[i] < top[j] and first < last:
        low_mass = float(np.float32(below[i + 1] * total))
        left = bisect_left(mass, low_mass, lo=first, hi=last)
        right = max(first, bisect_right(mass, high_mass(j + 1), lo=first, hi=last + 1) - 1)
        if left == first and right == last:
            # Only the top gives up mass now, step after step, until its bin moves.
            j = bisect_right(range(len(top)), -mass[last], lo=j + 1, key=lambda n: -high_mass(n))
            j -= 1
        elif left - first > last - right:
            first, i = left, i + 1
            yield first, last
        else:
            last, j = right, j + 1
            yield first, last


def _squared_errors(
    histogram: Tensor, bin_width: float, ranges: list[tuple[int, int]], levels: int
) -> list[float]:
    """The squared error of quantizing to levels over each range of bins, all in float32.

    The mass of a bin lies evenly within it. A bin that spans several levels costs the part of
    the first beyond its own start, the whole levels between, and the part of the last.
    """
    device = histogram.device
    first = torch.tensor([[a] for a, _ in ranges], device=device)
    width = torch.tensor(
        [[bin_width * (b - a + 1) / levels] for a, b in ranges], dtype=torch.float32, device=device
    )
    half = width / 2
    start = (torch.arange(histogram.numel(), device=device) - first) * bin_width
    end = start + bin_width
    level_of_start = torch.div(start, width, rounding_mode="floor").clamp_(0, levels - 1)
    level_of_end = torch.div(end, width, rounding_mode="floor").clamp_(0, levels - 1)
    density = histogram / bin_width

    def integral(begin: Tensor, stop: Tensor) -> Tensor:
        return density * ((stop * stop * stop - begin * begin * begin) / 3)

    error = integral(start - (level_of_start + 0.5) * width, half)
    error += (level_of_end - level_of_start - 1) * integral(-half, half)
    error += integral(-half, end - (level_of_end * width + half))
    sums: list[float] = error.sum(dim=1).tolist()
    return sums


def least_squares_range(
    histogram: Tensor, low: Tensor, high: Tensor, *, levels: int
) -> tuple[Tensor, Tensor]:
    """The range that the search ends with.

    Args:
        histogram: float32[bins] over [low, high].
        low: the lower edge of the first bin, float32.
        high: the upper edge of the last bin.
        levels: number of integers to quantize to.

    Returns:
        The new low and high, shaped like the old.
    """
    bins = histogram.numel()
    first, last = 0, bins - 1
    bin_width = (high.item() - low.item()) / bins
    moves = _moves(histogram) if bin_width > 0.0 else iter(())
    least, size, rises = float("inf"), 8, False
    while not rises and (ranges := list(islice(moves, size))):
        for move, error in zip(
            ranges, _squared_errors(histogram, bin_width, ranges, levels), strict=True
        ):
            rises = error > least
            if rises:
                break
            least, (first, last) = error, move
        size = min(2 * size, 64)
    step = (high - low) / bins
    return low + step * first, low + step * (last + 1)


_UPSAMPLE_RATE = 16
"""Each old bin is cut into so many before it is moved to new bins."""


class HistogramObserver(WholeObserver):
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

    def add(self, x_orig: Tensor) -> None:
        """Add the elements of x_orig to the histogram."""
        x = self.unmasked(x_orig)
        if x is not None:
            self._add(x)

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

    def find_qparams(self) -> tuple[Tensor, Tensor]:
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

"""A histogram on a grid of powers of two, and the range in it that costs the least squared error.

The bins are 2**exponent wide and their edges whole multiples of that. When the range outgrows
them, the width doubles and whole bins join: no element changes its place within a bin's width, so
nothing is smeared however often it grows, and histograms of several processes add up exactly.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import choose_qparams
from pt2e_quant.observers.base import PER_TENSOR, UniformQuantizationObserverBase
from pt2e_quant.observers.static.count_bins import count_multiples, count_zeros
from pt2e_quant.observers.static.mse_search import BinnedData, mse_optimal_range

# Below it a bin says nothing that a scale of at least 2**-23 could use.
_LEAST_EXPONENT = -64
# Edges must be float32 numbers: whole multiples of the width below 2**24.
_MANTISSA_BITS = 22
# A bin of zeros stands out if it holds so many times what its neighbours hold.
_STANDS_OUT = 4


@dataclass(frozen=True, slots=True)
class BinGrid:
    """Bins [offset + i, offset + i + 1) * 2**exponent, counted by i from 0."""

    exponent: int
    offset: int

    @property
    def width(self) -> float:
        """The width of one bin."""
        return math.ldexp(1.0, self.exponent)

    def edge(self, i: int) -> float:
        """The lower edge of bin i."""
        return math.ldexp(float(self.offset + i), self.exponent)

    def holds(self, low: float, high: float, bins: int) -> bool:
        """Whether [low, high] lies within the given number of bins."""
        return self.edge(0) <= low and high < self.edge(bins)


def grid_over(low: float, high: float, bins: int) -> BinGrid:
    """The finest grid of which so many bins cover [low, high], which lies in their middle."""
    reach = max(abs(low), abs(high))
    # frexp has no exponent for 0.0, also where the quotient is too small for a float: it says 0.
    share = (high - low) / bins
    spread = math.frexp(share)[1] - 1 if share > 0.0 else _LEAST_EXPONENT
    finest = math.frexp(reach)[1] - _MANTISSA_BITS if reach > 0.0 else _LEAST_EXPONENT
    exponent = max(spread, finest, _LEAST_EXPONENT)
    while True:
        first = _bin_of(low, exponent)
        used = _bin_of(high, exponent) - first + 1
        if used <= bins:
            return BinGrid(exponent, first - (bins - used) // 2)
        exponent += 1


def _bin_of(value: float, exponent: int) -> int:
    """floor(value / 2**exponent), also of a value so small that the quotient underflows."""
    quotient = math.ldexp(value, -exponent)
    return -1 if value < 0.0 and quotient == 0.0 else math.floor(quotient)


class MSEObserver(UniformQuantizationObserverBase):
    """A histogram whose qparams cost the least squared error.

    Args:
        bins: number of bins.
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        **kwargs: as of `UniformQuantizationObserverBase`; is_dynamic must be False.
    """

    histogram: Tensor
    bin_exponent: Tensor
    bin_offset: Tensor
    zero_count: Tensor

    def __init__(
        self,
        bins: int = 2048,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        **kwargs: Any,
    ) -> None:
        super().__init__(dtype, qscheme, **kwargs)
        self.require_qscheme(PER_TENSOR)
        self.require_static()
        if bins < 2:
            raise ConfigError(f"MSEObserver needs at least 2 bins, found {bins}")
        self.bins = bins
        device = self.eps.device
        self.register_buffer("histogram", torch.zeros(bins, dtype=torch.int64, device=device))
        for name in ("bin_exponent", "bin_offset", "zero_count"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64, device=device))
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

    @property
    def grid(self) -> BinGrid:
        """Where the bins lie."""
        return BinGrid(int(self.bin_exponent.item()), int(self.bin_offset.item()))

    def _add(self, x: Tensor) -> None:
        old_low, old_high = self.min_val.item(), self.max_val.item()
        low, high = self.widened_range(x, old_low, old_high)
        grid = self.grid
        if not (old_low <= old_high and grid.holds(low, high, self.bins)):
            old, grid = grid, grid_over(low, high, self.bins)
            self._rebin(old, grid)
        counts = count_multiples(x, self.bins, grid.exponent, grid.offset)
        self.zero_count += _exact_zeros(x, counts, grid)
        self.histogram += counts.to(self.histogram.device)
        self.min_val.fill_(low)
        self.max_val.fill_(high)

    def _rebin(self, old: BinGrid, new: BinGrid) -> None:
        """Move the counts to a coarser or shifted grid."""
        occupied = self.histogram.nonzero().flatten()
        counts = self.histogram[occupied]
        # A shift of a negative integer rounds down, as whole bins that join must.
        target = ((occupied + old.offset) >> min(new.exponent - old.exponent, 63)) - new.offset
        self.histogram.zero_().index_add_(0, target, counts)
        self.bin_exponent.fill_(new.exponent)
        self.bin_offset.fill_(new.offset)

    def binned_data(self) -> BinnedData:
        """What was seen, but for exact zeros, between the least and greatest value."""
        counts = self.histogram.cpu()
        occupied = counts.nonzero().flatten()
        first, last = int(occupied[0]), int(occupied[-1])
        grid = self.grid
        edges = torch.arange(first, last + 2, dtype=torch.float64) + grid.offset
        edges = (edges * grid.width).clamp(self.min_val.item(), self.max_val.item())
        inside = counts[first : last + 1].to(torch.float64)
        if 0 <= -grid.offset - first < inside.numel():
            inside[-grid.offset - first] -= float(self.zero_count.item())
        return BinnedData(edges=edges, counts=inside)

    def optimal_range(self) -> tuple[Tensor, Tensor]:
        """The low and high end with the least squared error, float32 without axes."""
        low, high = mse_optimal_range(
            self.binned_data(),
            self._choose,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            symmetric=self.is_symmetric,
        )
        return low.to(self.min_val), high.to(self.max_val)

    def _choose(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        return choose_qparams(
            low,
            high,
            quant_min=self.quant_min,
            quant_max=self.quant_max,
            symmetric=self.is_symmetric,
            eps=self.eps.to(low.device),
            zero_point_if_symmetric=self.zero_point_if_symmetric,
        )

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the optimal range, both [1]."""
        if not self.seen or bool(self.min_val == self.max_val):
            return self.qparams_of(self.min_val, self.max_val)
        return self.qparams_of(*self.optimal_range())

    def reset_min_max_vals(self) -> None:
        """Forget all statistics."""
        self._observed_once = False
        for buffer in (self.histogram, self.bin_exponent, self.bin_offset, self.zero_count):
            buffer.zero_()
        self.min_val.fill_(torch.inf)
        self.max_val.fill_(-torch.inf)


def _exact_zeros(x: Tensor, counts: Tensor, grid: BinGrid) -> int:
    """How many elements are 0.0, if they stand out in the bin that starts at 0.0; else 0.

    The extra pass over x is made only where the answer matters (after a relu, for padding).
    """
    at = -grid.offset
    if not 0 <= at < counts.numel():
        return 0
    around = counts[max(at - 1, 0) : at + 2].tolist()
    held = around.pop(1 if at > 0 else 0)
    if held <= _STANDS_OUT * max(around):
        return 0
    return count_zeros(x)

"""A histogram on a grid of powers of two, and the range in it that costs the least squared error.

The bins are 2**exponent wide and their edges whole multiples of that. When the range outgrows
them, the width doubles and whole bins join: no element changes its place within a bin's width, so
nothing is smeared however often it grows, and histograms of several processes add up exactly.

Clipping costs what lies beyond the range, a wide range costs coarse steps. Candidates for both
ends are first compared by a cheap model of that error, all pairs at once from running sums. The
best few and the whole range are then compared by the exact error, and the best of them is moved
as long as that helps: with few bits or peaked data the model alone is too rough.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import choose_qparams
from pt2e_quant.observers.base import PER_TENSOR
from pt2e_quant.observers.observe_whole import WholeObserver
from pt2e_quant.observers.static.count_bins import count_multiples, count_zeros

ChooseQParams = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""A function from lows and highs [K] to the scale and zero_point of an observer, both [K]."""

_OCTAVES = 8
_PER_OCTAVE = 8
_FINALISTS = 24
_REFINEMENTS = (1 / 4, 1 / 16, 1 / 64)
"""Octaves by which an end is moved, one after the other."""
_ROUNDS = 6


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BinnedData:
    """Counts between edges; the elements of a bin lie evenly in it, at its edge if it has no width.

    Exact zeros are left out: every candidate represents them without error.

    Attributes:
        edges: float64[B + 1], rising; the first is the least value, the last the greatest.
        counts: float64[B].
    """

    edges: Tensor
    counts: Tensor


def squared_errors(
    data: BinnedData, scale: Tensor, zero_point: Tensor, quant_min: int, quant_max: int
) -> Tensor:
    """The exact sum of (x - fake_quantize(x))**2 over the data for each of K qparams.

    Within the cell of one integer n, with r = x - n * scale, the error is r**2 and its integral
    r**3 / 3; each cell passed adds scale**3 / 12. The outermost cells have no end: that is the
    clipping.

    Args:
        data: what is quantized.
        scale: [K].
        zero_point: [K].
        quant_min: least integer used.
        quant_max: greatest integer used.

    Returns:
        float64[K]
    """
    step = scale.to(torch.float64)[:, None]
    zero = zero_point.to(torch.float64)[:, None]
    edges = data.edges
    cell = torch.round(edges / step)
    cell = torch.minimum(torch.maximum(cell, quant_min - zero), quant_max - zero)
    rest = edges - cell * step
    integral = cell * (step**3 / 12) + rest**3 / 3
    width = edges.diff()
    has_width = width > 0
    density = torch.where(has_width, data.counts / width.clamp(min=1e-300), 0.0)
    at_edge = torch.where(has_width, 0.0, data.counts)
    return integral.diff(dim=1) @ density + (rest[:, :-1] ** 2) @ at_edge


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Model:
    """The cheap model: clipping costs from tables at the edges, scale**2 / 12 for what is inside.

    Attributes:
        edges: float64[B + 1].
        below: cost and count of what lies below each edge, [2, B + 1].
        above: cost and count of what lies above each edge, [2, B + 1].
        steps: quant_max - quant_min.
    """

    edges: Tensor
    below: Tensor
    above: Tensor
    steps: int

    def errors(self, low: Tensor, high: Tensor) -> Tensor:
        """The modelled error of each range [low, high], rounded outwards to edges; all [K]."""
        last = self.edges.numel() - 1
        under = self.below[:, (torch.searchsorted(self.edges, low, right=True) - 1).clamp(min=0)]
        over = self.above[:, torch.searchsorted(self.edges, high).clamp(max=last)]
        inside = self.below[1, -1] - under[1] - over[1]
        return under[0] + over[0] + inside * ((high - low) / self.steps) ** 2 / 12


def _model_of(data: BinnedData, steps: int) -> _Model:
    a, b = data.edges[:-1], data.edges[1:]
    moments = torch.stack([torch.ones_like(a), (a + b) / 2, (a * a + a * b + b * b) / 3])
    before = torch.nn.functional.pad(torch.cumsum(moments * data.counts, dim=1), (1, 0))

    def costs(count: Tensor, first: Tensor, second: Tensor) -> Tensor:
        # The sum of (x - edge)**2 over the elements on one side of the edge.
        squares = second - 2 * data.edges * first + data.edges**2 * count
        return torch.stack([squares.clamp(min=0.0), count])

    return _Model(
        edges=data.edges, below=costs(*before), above=costs(*(before[:, -1:] - before)), steps=steps
    )


def ranges_within(whole: Tensor, shares: Tensor, symmetric: bool) -> Tensor:
    """Candidate ranges [2, K]: shares of each end of the whole range, [2, S], in all pairs.

    A symmetric range has one share for both ends.
    """
    ends = whole[:, None] * shares
    if symmetric:
        return ends
    low, high = (torch.unique(end) for end in ends)
    return torch.cartesian_prod(low, high).T.contiguous()


def cheapest_ranges(data: BinnedData, ranges: Tensor, steps: int, count: int) -> Tensor:
    """Those of some ranges [2, K] that a model takes for the cheapest, [2, count at most].

    The model is within a few percent of `squared_errors`, in a tenth of its time.

    Args:
        data: what is quantized.
        ranges: low and high ends.
        steps: quant_max - quant_min.
        count: how many to return, the cheapest first.
    """
    errors = _model_of(data, steps).errors(*ranges)
    return ranges[:, errors.topk(min(count, ranges.shape[1]), largest=False).indices]


def mse_optimal_range(
    data: BinnedData,
    choose: ChooseQParams,
    *,
    quant_min: int,
    quant_max: int,
    symmetric: bool,
) -> tuple[Tensor, Tensor]:
    """The range with the least squared error; never worse than the whole range.

    Args:
        data: what is to be quantized.
        choose: the qparams that a range leads to.
        quant_min: least integer used.
        quant_max: greatest integer used.
        symmetric: the range is to be symmetric around 0.0.

    Returns:
        low <= 0 and high >= 0, float32 without axes.
    """
    whole = torch.stack([data.edges[0].clamp(max=0.0), data.edges[-1].clamp(min=0.0)])
    if symmetric:
        reach = whole.abs().max()
        whole = torch.stack([-reach, reach])
    depth = torch.arange(_OCTAVES * _PER_OCTAVE + 1, dtype=torch.float64) / _PER_OCTAVE
    coarse = ranges_within(whole, torch.exp2(-depth).expand(2, -1), symmetric)
    finalists = cheapest_ranges(data, coarse, quant_max - quant_min, _FINALISTS)

    def cheapest(ranges: Tensor) -> tuple[Tensor, float]:
        scale, zero_point = choose(*ranges.to(torch.float32))
        errors = squared_errors(data, scale, zero_point, quant_min, quant_max)
        winner = int(errors.argmin())
        return ranges[:, winner], float(errors[winner])

    # argmin takes the first of equals: the whole range, unless another is better.
    best, least = cheapest(torch.cat([whole[:, None], finalists], dim=1))
    reach = torch.where(whole == 0, 1.0, whole)
    for octaves in _REFINEMENTS:
        around = torch.exp2(torch.linspace(-2, 2, 5, dtype=torch.float64) * octaves)
        for _ in range(_ROUNDS):
            shares = ((best / reach)[:, None] * around).clamp(max=1.0)
            found, error = cheapest(ranges_within(whole, shares, symmetric))
            if error >= least:
                break
            best, least = found, error
    low, high = best.to(torch.float32)
    return low, high


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
        """True if [low, high] lies within the given number of bins."""
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


class MSEObserver(WholeObserver):
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

    def add(self, x_orig: Tensor) -> None:
        """Add the elements of x_orig to the histogram."""
        x = self.unmasked(x_orig)
        if x is not None:
            self._add(x)

    @property
    def grid(self) -> BinGrid:
        """The grid of the bins: exponent and offset."""
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
        """Counts of all values seen, without exact zeros, between the least and the greatest."""
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

    def find_qparams(self) -> tuple[Tensor, Tensor]:
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
    """Count the elements that are 0.0, if they stand out in the bin that starts at 0.0; else 0.

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

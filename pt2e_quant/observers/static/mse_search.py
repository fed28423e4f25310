"""The range that quantizes binned data with the least squared error.

Clipping costs what lies beyond the range, a wide range costs coarse steps. Candidates for both
ends are first compared by a cheap model of that error, all pairs at once from running sums. The
best few and the whole range are then compared by the exact error, and the best of them is moved
as long as that helps: with few bits or peaked data the model alone is too rough.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ChooseQParams = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""From [K] lows and highs to the scale and zero_point that an observer would take, both [K]."""

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


def _ranges(whole: Tensor, shares: Tensor, symmetric: bool) -> Tensor:
    """Candidate ranges [2, K]: shares of each end of the whole range, [2, S], in all pairs.

    A symmetric range has one share for both ends.
    """
    ends = whole[:, None] * shares
    if symmetric:
        return ends
    low, high = (torch.unique(end) for end in ends)
    return torch.cartesian_prod(low, high).T.contiguous()


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
    model = _model_of(data, quant_max - quant_min)
    depth = torch.arange(_OCTAVES * _PER_OCTAVE + 1, dtype=torch.float64) / _PER_OCTAVE
    coarse = _ranges(whole, torch.exp2(-depth).expand(2, -1), symmetric)
    count = min(_FINALISTS, coarse.shape[1])
    finalists = coarse[:, model.errors(*coarse).topk(count, largest=False).indices]

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
            found, error = cheapest(_ranges(whole, shares, symmetric))
            if error >= least:
                break
            best, least = found, error
    low, high = best.to(torch.float32)
    return low, high

"""The range that loses the least information, by Kullback-Leibler divergence.

S. Migacz, "8-bit Inference with TensorRT" (GTC 2017): the distribution clipped to a range is held
against the same after quantization to the available levels; the range with the least divergence
wins. There it is the range [-t, t] over magnitudes; here an affine range may be cut at both ends,
the upper end first.
"""

import torch
from torch import Tensor

from pt2e_quant.observers.static.mse import MSEObserver

_CANDIDATES = 128
"""Ends tried on each side, evenly spaced."""
_FAR = 4
"""Data so many times its own spread away from 0.0: all of the range is needed to reach it."""
_LEAST = 1e-12
"""Stands for a probability of zero, which the divergence cannot take."""


class EntropyObserver(MSEObserver):
    """A histogram whose qparams lose the least information.

    Arguments, statistics and state are those of MSEObserver; only the choice of the range from
    them differs. With more levels than bins (16 bits) no range is better than the whole one.
    """

    def optimal_range(self) -> tuple[Tensor, Tensor]:
        """The low and high end with the least divergence, float32 without axes."""
        levels = self.quant_max - self.quant_min + 1
        low, high = self.min_val.item(), self.max_val.item()
        counts, first = self._counts_around_zero()
        if counts is None:
            return self.min_val, self.max_val
        width = self.grid.width
        if self.is_symmetric:
            least = min(levels // 2 + 1, counts.numel())
            kept = _best_end(_magnitudes(counts, first), max(levels // 2, 1), least)
            high = min(kept * width, max(-low, high))
            low = -high
        else:
            end = _best_end(counts, levels, max(levels, -first))
            high = min((first + end) * width, high)
            start = _best_end(counts[:end].flip(0), levels, max(levels, first + end))
            low = max((first + end - start) * width, low)
        return torch.tensor(low).to(self.min_val), torch.tensor(high).to(self.max_val)

    def _counts_around_zero(self) -> tuple[Tensor | None, int]:
        """float64 counts of bins, from bin number `first` on (0 starts at 0.0), with 0.0 inside.

        None if 0.0 is too far away.
        """
        counts = self.histogram.cpu().to(torch.float64)
        occupied = counts.nonzero().flatten()
        offset = self.grid.offset
        start, stop = int(occupied[0]) + offset, int(occupied[-1]) + offset + 1
        first, last = min(start, 0), max(stop, 0)
        if last - first > _FAR * self.bins:
            return None, first
        padded = torch.zeros(last - first, dtype=torch.float64)
        padded[start - first : stop - first] = counts[start - offset : stop - offset]
        if -first < padded.numel():
            # Every range represents 0.0 itself; its peak would only drown the rest.
            padded[-first] -= float(self.zero_count.item())
        return padded, first


def _magnitudes(counts: Tensor, first: int) -> Tensor:
    """Counts by distance from 0.0, of counts that start at bin number `first` <= 0."""
    above, below = counts[-first:], counts[:-first].flip(0)
    both = torch.zeros(max(above.numel(), below.numel()), dtype=torch.float64)
    both[: above.numel()] += above
    both[: below.numel()] += below
    return both


def _best_end(counts: Tensor, levels: int, least: int) -> int:
    """Return the number of leading bins, at least `least`, that gives the least divergence."""
    bins = counts.numel()
    if least >= bins:
        return bins
    step = (bins - least) / _CANDIDATES
    ends = sorted({round(least + step * i) for i in range(_CANDIDATES)} | {bins})
    losses = [_divergence(counts, end, levels) for end in ends]
    # Of equal losses the widest range: it clips nothing that the others keep.
    return ends[len(losses) - 1 - losses[::-1].index(min(losses))]


def _divergence(counts: Tensor, end: int, levels: int) -> float:
    """KL divergence of data clipped to its first `end` bins from the same on `levels` levels."""
    kept = counts[:end]
    clipped = kept.clone()
    clipped[-1] += counts[end:].sum()
    level = torch.arange(end) * levels // end
    count = min(levels, end)
    sums = torch.zeros(count, dtype=torch.float64).index_add_(0, level, kept)
    is_filled = (kept > 0).to(torch.float64)
    filled = torch.zeros(count, dtype=torch.float64).index_add_(0, level, is_filled)
    spread = (sums / filled.clamp(min=1.0))[level] * is_filled
    p = clipped / clipped.sum()
    q = (spread / spread.sum().clamp(min=_LEAST)).clamp(min=_LEAST)
    return float(torch.where(p > 0, p * (p / q).log(), 0.0).sum())

"""The greedy search of torch.ao for a range in a histogram, many candidates at a time.

From the whole range, each step gives up 1e-5 of the mass at the end where that frees more bins,
as long as the squared error of quantizing what the histogram holds does not rise.

Source: NonlinearQuantizationParamsSearch of Caffe2 (norm_minimization.cc), as it stands in
torch/ao/quantization/observer.py (HistogramObserver). The result is the same to the last bit.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice

import numpy as np
import torch
from torch import Tensor

__all__ = ["least_squares_range"]

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

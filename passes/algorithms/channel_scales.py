"""Choose a scale per channel that lowers the rounding error of a tensor quantized as a whole.

Where a few channels are much larger than the rest they set the scale of all. Dividing channel j by
s_j before the quantize, and multiplying it back after (or into the next weight), gives every
channel its own step. The family is

    s_j = max(m_j, quantile_p(m)) ** alpha,   m_j = greatest calibrated magnitude of channel j:

alpha 1 touches the channels above the quantile alone; smaller alphas leave them part of their
size, which costs the weight they are multiplied into less (Xiao et al. 2023, SmoothQuant).

A choice that looks best on the data it was fitted to has no headroom left for a channel that stays
small in calibration. So every candidate is fitted to three quarters of the calibrated blocks and
its clipping is measured on the fourth, four times; and of the candidates within 10 % of the best
the weakest is taken. Nothing here looks at activations again: per-block ranges are enough.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import log10

import torch
from torch import Tensor

from pt2e_quant.observers.statistics.channel_statistics import ChannelStatistics
from pt2e_quant.passes.algorithms.grid import Declined

QUANTILES = (0.5, 0.9, 0.99)
EXPONENTS = (0.5, 0.7, 1.0)
FOLDS = 4
SLACK = 1.1
WIDEST = 1000.0
"""The greatest ratio of two channels' scales."""
GROUPS = 32
"""Channels looked at one by one, and groups that the others are looked at in."""
STEPS = 255.0
WEIGHT_STEPS = 127.0
Candidates = tuple[tuple[float, float], ...]
"""(quantile, exponent) of each scale that is tried; the first changes nothing."""


def candidates_of(
    exponents: Sequence[float] = EXPONENTS, quantiles: Sequence[float] = QUANTILES
) -> Candidates:
    """Candidates, weak to strong: a lower exponent and a higher quantile change the tensor less."""
    steps = product(sorted(exponents), sorted(quantiles, reverse=True))
    return ((0.5, 0.0), *((quantile, exponent) for exponent, quantile in steps))


CANDIDATES = candidates_of()


@dataclass(frozen=True, slots=True)
class ChannelScale:
    """A chosen scale: divide the tensor's channels by `factors`, all at least 1.

    Args:
        factors: [C].
        quantile: of the family.
        exponent: of the family.
        error: mean squared error expected with it, per row of the operator's output.
        error_before: the same without.
    """

    factors: Tensor
    quantile: float
    exponent: float
    error: float
    error_before: float

    def exact_in(self, dtype: torch.dtype) -> "ChannelScale":
        """In half precision, the nearest powers of two: they multiply without rounding."""
        if dtype.itemsize >= 4:
            return self
        return replace(self, factors=torch.exp2(self.factors.log2().round()))

    @property
    def step(self) -> str:
        """One line for the provenance record."""
        gain = 10 * log10(self.error_before / max(self.error, 1e-30))
        return (
            f"/ max(absmax, quantile {self.quantile:g}) ** {self.exponent:g} per channel: "
            f"{gain:.1f} dB less error expected, x{float(self.factors.max()):.3g} at most"
        )


def choose_channel_scale(
    statistics: ChannelStatistics,
    *,
    weight: Tensor | None = None,
    least_gain: float,
    candidates: Candidates = CANDIDATES,
    is_rounded: bool = True,
) -> ChannelScale:
    """The channel scale with the least expected error.

    Args:
        statistics: of the tensor to be quantized.
        weight: [out, C], what multiplies the tensor and takes the scale; None where the scale is
            multiplied back in float.
        least_gain: by what factor the error must fall.
        candidates: what is tried.
        is_rounded: whether the tensor itself is; else only the weight is.

    Raises:
        Declined: none gains that much.
    """
    absmax = statistics.absmax
    factors = family(absmax[None], candidates)[:, 0]
    if weight is None:
        errors = activation_errors(statistics, torch.ones_like(absmax), candidates)
    else:
        errors = weight_errors(weight, statistics, factors)
        if is_rounded:
            errors = errors + activation_errors(statistics, weight.square().sum(0), candidates)
    found = errors.tolist()
    best = min(found)
    if not found[0] > best * least_gain:
        raise Declined("no channel scale lowers the expected error enough")
    chosen = next(i for i, error in enumerate(found) if i and error <= best * SLACK)
    return ChannelScale(
        factors=factors[chosen],
        quantile=candidates[chosen][0],
        exponent=candidates[chosen][1],
        error=found[chosen],
        error_before=found[0],
    )


def family(absmax: Tensor, candidates: Candidates = CANDIDATES) -> Tensor:
    """The scales of all candidates, [candidates, fits, C], each at least 1.

    Args:
        absmax: greatest magnitude of each channel, [fits, C].
        candidates: (quantile, exponent) of each.

    >>> family(torch.tensor([[1.0, 1.0, 1.0, 8.0]]))[-1]
    tensor([[1., 1., 1., 8.]])
    """
    # A channel that was 0 in calibration keeps some range: no two scales differ more than this.
    least = (absmax.amax(1, keepdim=True) / WIDEST).clamp_(min=torch.finfo(absmax.dtype).tiny)
    absmax = torch.maximum(absmax, least)
    levels = torch.tensor([p for p, _ in candidates], dtype=absmax.dtype)
    exponents = torch.tensor([a for _, a in candidates], dtype=absmax.dtype)
    floors = torch.quantile(absmax, levels, dim=1, interpolation="higher")
    factors = torch.maximum(absmax, floors[..., None]).pow_(exponents[:, None, None])
    return factors.div_(factors.amin(2, keepdim=True))


def activation_errors(
    statistics: ChannelStatistics, sensitivity: Tensor, candidates: Candidates = CANDIDATES
) -> Tensor:
    """Expected squared error per row from rounding, and from clipping in blocks not fitted to.

    A channel far below half a step is rounded to zero: its error is its own square.
    """
    blocks = statistics.low.shape[0]
    number = min(FOLDS, blocks)
    fold = torch.arange(blocks) % number
    held = [fold == f for f in range(number)]
    fitted = [~h for h in held] if blocks > 1 else held
    top = torch.stack([statistics.high[f].amax(0) for f in fitted])
    bottom = torch.stack([statistics.low[f].amin(0) for f in fitted])
    factors = family(torch.maximum(top, -bottom), candidates)
    high = (top / factors).amax(2, keepdim=True).clamp_(min=0)
    low = (bottom / factors).amin(2, keepdim=True).clamp_(max=0)
    rounding = ((high - low) / STEPS * factors).square_().div_(12)
    errors = torch.minimum(rounding, statistics.mean_square) @ sensitivity
    for f, h in enumerate(held):
        scale = factors[:, f, None]
        above = statistics.high[h] - high[:, f, None] * scale
        below = low[:, f, None] * scale - statistics.low[h]
        clipping = torch.maximum(above, below).clamp_(min=0).square_() @ sensitivity
        errors[:, f] += clipping.mean(1) / statistics.rows_per_block
    return errors.mean(1)


def weight_errors(weight: Tensor, statistics: ChannelStatistics, factors: Tensor) -> Tensor:
    """Expected squared error per row from rounding `weight * factors` per output channel.

    Every candidate's factors grow with absmax. So the greatest `weight * factors` of a row is
    sought among channels sorted by absmax and taken together where their factors are close:
    the weight is read once, not once for each candidate.
    """
    order = statistics.absmax.argsort(descending=True)
    magnitude = group_maxima(weight.abs()[:, order])
    tops = [(magnitude * factor).amax(1) for factor in group_maxima(factors[:, order])]
    per_output = (torch.stack(tops) / WEIGHT_STEPS).square().sum(1) / 12
    return per_output * (statistics.mean_square / factors.square()).sum(1)


def group_maxima(rows: Tensor) -> Tensor:
    """Maxima over neighbouring columns: the first ones stay alone, the rest in equal groups."""
    size = -(-(rows.shape[1] - GROUPS) // GROUPS)
    if size <= 1:
        return rows
    alone, rest = rows[:, :GROUPS], rows[:, GROUPS:]
    even = rest.shape[1] // size * size
    grouped = rest[:, :even].reshape(len(rest), -1, size).amax(2)
    odd = [rest[:, even:].amax(1, keepdim=True)] if even < rest.shape[1] else []
    return torch.cat((alone, grouped, *odd), dim=1)

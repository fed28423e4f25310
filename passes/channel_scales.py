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

from collections.abc import Iterator
from dataclasses import dataclass
from math import log10

import torch
from torch import Tensor

from pt2e_quant.observers.channel_statistics import ChannelStatistics

__all__ = ["ChannelScale", "choose_channel_scale"]

QUANTILES = (0.5, 0.9, 0.99)
EXPONENTS = (0.5, 0.7, 1.0)
FOLDS = 4
SLACK = 1.1
WEIGHT_ROWS = 256
"""Rows of a weight that its rounding error is estimated from."""
STEPS = 255.0
WEIGHT_STEPS = 127.0


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

    @property
    def step(self) -> str:
        """One line for the provenance record."""
        gain = 10 * log10(self.error_before / max(self.error, 1e-30))
        return (
            f"/ max(absmax, quantile {self.quantile:g}) ** {self.exponent:g} per channel: "
            f"{gain:.1f} dB less error expected, x{float(self.factors.max()):.3g} at most"
        )


def choose_channel_scale(
    statistics: ChannelStatistics, *, weight: Tensor | None = None, least_gain: float
) -> ChannelScale | None:
    """The channel scale with the least expected error, None if it gains too little.

    Args:
        statistics: of the tensor to be quantized.
        weight: [out, C], what multiplies the tensor and takes the scale; None where the scale is
            multiplied back in float.
        least_gain: by what factor the error must fall.
    """
    absmax = statistics.absmax
    sensitivity = torch.ones_like(absmax) if weight is None else weight.square().sum(0)

    def expected(quantile: float, exponent: float) -> float:
        factors = family(absmax, quantile, exponent)
        error = activation_error(statistics, sensitivity, quantile, exponent)
        return error if weight is None else error + weight_error(weight, statistics, factors)

    error_before = expected(QUANTILES[0], 0.0)
    candidates = [(p, a) for p in QUANTILES for a in EXPONENTS]
    errors = {candidate: expected(*candidate) for candidate in candidates}
    best = min(errors.values())
    if not error_before > best * least_gain:
        return None
    fitting = [candidate for candidate in candidates if errors[candidate] <= best * SLACK]
    # A lower exponent and a higher quantile change the tensor less.
    quantile, exponent = min(fitting, key=lambda candidate: (candidate[1], -candidate[0]))
    return ChannelScale(
        factors=family(absmax, quantile, exponent),
        quantile=quantile,
        exponent=exponent,
        error=errors[quantile, exponent],
        error_before=error_before,
    )


def family(absmax: Tensor, quantile: float, exponent: float) -> Tensor:
    """The scale of each channel, at least 1.

    >>> family(torch.tensor([1.0, 1.0, 1.0, 8.0]), 0.5, 1.0)
    tensor([1., 1., 1., 8.])
    """
    floor = torch.quantile(absmax, quantile)
    if floor <= 0:
        floor = absmax[absmax > 0].amin() if bool((absmax > 0).any()) else floor + 1
    factors = torch.maximum(absmax, floor) ** exponent
    return factors / factors.amin()


def activation_error(
    statistics: ChannelStatistics, sensitivity: Tensor, quantile: float, exponent: float
) -> float:
    """Expected squared error per row from rounding, and from clipping in blocks not fitted to.

    A channel far below half a step is rounded to zero: its error is its own square.
    """
    total, count = 0.0, 0
    for fitted, held in folds(statistics.low.shape[0]):
        top, bottom = statistics.high[fitted].amax(0), statistics.low[fitted].amin(0)
        factors = family(torch.maximum(top, -bottom), quantile, exponent)
        high = (top / factors).amax().clamp(min=0)
        low = (bottom / factors).amin().clamp(max=0)
        step = (high - low) / STEPS
        rounding = torch.minimum((step * factors).square() / 12, statistics.mean_square)
        beyond = torch.maximum(
            statistics.high[held] / factors - high, low - statistics.low[held] / factors
        )
        clipping = (beyond.clamp(min=0) * factors).square() * sensitivity
        total += float((rounding * sensitivity).sum())
        total += float(clipping.sum(1).mean()) / statistics.rows_per_block
        count += 1
    return total / count


def folds(blocks: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Index tensors (fitted to, held back); a single block is both."""
    index = torch.arange(blocks)
    if blocks == 1:
        yield index, index
        return
    number = min(FOLDS, blocks)
    for fold in range(number):
        held = index % number == fold
        yield index[~held], index[held]


def weight_error(weight: Tensor, statistics: ChannelStatistics, factors: Tensor) -> float:
    """Expected squared error per row from rounding `weight * factors` per output channel."""
    some = weight[:: max(1, weight.shape[0] // WEIGHT_ROWS)]
    step = (some.abs() * factors).amax(1) / WEIGHT_STEPS
    per_output = step.square().mean() * weight.shape[0] / 12
    return float(per_output * (statistics.mean_square / factors.square()).sum())

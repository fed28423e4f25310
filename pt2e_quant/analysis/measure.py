"""Figures of a pair of tensors, summed over batches: memory does not grow with their number."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pt2e_quant.core.inexact import as_reals
from pt2e_quant.flow.report.worst_tensors import by_channel, median_db

BINS = 64
"""The number of bins of the histograms from which the divergence is computed."""

SAMPLED = 8192
"""The number of a tensor's values, evenly spread, that enter its histogram with each batch."""

OUTLIER = 8.0
"""A channel whose largest value is this many times the median channel's stands out."""

_HUGE = torch.finfo(torch.float32).max / 2
"""Floats from here on stand for infinity: masks are written with the largest finite number."""


def ratio_db(signal: float, noise: float) -> float:
    """10 log10(signal / noise); inf without noise, -inf without signal or with infinite noise."""
    if noise <= 0:
        return math.inf
    is_some = signal > 0 and math.isfinite(noise)
    return 10 * math.log10(signal / noise) if is_some else -math.inf


def as_floats(reference: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
    """Both as float32, with 0 in both where the reference is masked, infinite or NaN."""
    a, b = as_reals(reference).float(), as_reals(found).float()
    # The sum of squares of a huge number is infinite too.
    if math.isfinite(_squares(a)):
        return a, b
    kept = a.isfinite() & (a.abs() < _HUGE)
    zero = a.new_zeros(())
    return torch.where(kept, a, zero), torch.where(kept, b, zero)


@dataclass(slots=True)
class Noise:
    """Signal, noise and the largest error of one pair of tensors.

    NaN or infinity on the other side where the reference is finite is infinite noise.
    """

    signal: float = 0.0
    noise: float = 0.0
    largest: float = 0.0

    def add(self, reference: Tensor, found: Tensor) -> None:
        """Add a batch."""
        error = found - reference
        self.count(error, _squares(reference), _squares(error))

    def count(self, error: Tensor, signal: float, noise: float) -> None:
        """Add a batch of which the sums of squares are known."""
        self.signal += signal
        if not math.isfinite(noise):
            self.noise = self.largest = math.inf
            return
        self.noise += noise
        if error.numel():
            self.largest = max(self.largest, -float(error.amin()), float(error.amax()))

    @property
    def sqnr_db(self) -> float:
        """Signal to quantization noise ratio."""
        return ratio_db(self.signal, self.noise)


@dataclass(slots=True)
class ChannelNoise:
    """Signal and noise of one pair of tensors, all in all and channel by channel."""

    error: Noise = field(default_factory=Noise)
    signals: Tensor | None = None
    noises: Tensor | None = None

    def add(self, reference: Tensor, found: Tensor) -> None:
        """Add a batch."""
        error = found - reference
        noise, signal = _channel_squares(error), _channel_squares(reference)
        noise = noise.nan_to_num(nan=math.inf, posinf=math.inf)
        self.error.count(error, float(signal.sum()), float(noise.sum()))
        if self.signals is None or self.noises is None:
            self.signals, self.noises = signal, noise
        elif self.signals.shape == signal.shape:  # else a dynamic size is the last one
            self.signals, self.noises = self.signals + signal, self.noises + noise

    @property
    def median_db(self) -> float:
        """The SQNR of the median channel."""
        if self.signals is None or self.noises is None:
            return math.inf
        return median_db(self.signals, self.noises)


def _squares(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _channel_squares(values: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(by_channel(values), dim=1)
    return norms.double().square()


@dataclass(slots=True)
class PairFigures:
    """Everything that a row of a comparison says of two values of one activation."""

    error: Noise = field(default_factory=Noise)
    dot: float = 0.0
    found_squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf
    elements: int = 0
    clipped: int = 0
    channels: Tensor | None = None
    edges: tuple[float, float] = (0.0, 0.0)
    reference_bins: Tensor | None = None
    found_bins: Tensor | None = None

    def add(self, reference: Tensor, found: Tensor, range_kept: tuple[float, float] | None) -> None:
        """Add a batch.

        Args:
            reference: of the reference, float.
            found: of the other side, same shape.
            range_kept: what the other side can represent, with half a step on both sides.
        """
        if not reference.numel():
            return
        self.error.add(reference, found)
        if not math.isfinite(self.error.noise):
            found = found.nan_to_num(0.0, 0.0, 0.0)
        flat, other = reference.reshape(-1), found.reshape(-1)
        self.dot += float(torch.dot(flat, other))
        self.found_squares += _squares(found)
        low, high = self._add_channels(reference)
        self.low, self.high = min(self.low, low), max(self.high, high)
        self.elements += reference.numel()
        if range_kept is not None and (low < range_kept[0] or high > range_kept[1]):
            outside = (reference < range_kept[0]) | (reference > range_kept[1])
            self.clipped += int(outside.sum())
        self._add_bins(flat, other)

    def _add_channels(self, reference: Tensor) -> tuple[float, float]:
        """Add the largest values of a batch; returns its least and its greatest one."""
        rows = by_channel(reference)
        # aminmax of a dimension takes twenty times as long (torch 2.13).
        low, high = rows.amin(1), rows.amax(1)
        peaks = torch.maximum(-low, high)
        if self.channels is None:
            self.channels = peaks
        elif self.channels.shape == peaks.shape:
            self.channels = torch.maximum(self.channels, peaks)
        return float(low.amin()), float(high.amax())

    def _add_bins(self, reference: Tensor, found: Tensor) -> None:
        stride = max(1, reference.numel() // SAMPLED)
        a, b = reference[::stride], found[::stride]
        if self.reference_bins is None:
            low, high = (float(v) for v in torch.aminmax(a))
            self.edges = (low, max(high - low, 1e-30))
            self.reference_bins = torch.zeros(BINS, dtype=torch.int64, device=a.device)
            self.found_bins = torch.zeros(BINS, dtype=torch.int64, device=a.device)
        assert self.found_bins is not None
        self.reference_bins += self._counts(a)
        self.found_bins += self._counts(b)

    def _counts(self, values: Tensor) -> Tensor:
        start, width = self.edges
        places = ((values - start) * (BINS / width)).clamp_(0, BINS - 1).to(torch.int64)
        return torch.bincount(places, minlength=BINS)

    @property
    def cosine(self) -> float:
        """The cosine between the two values; 1 where both are zero, 0 of NaN and infinity."""
        if not math.isfinite(self.error.noise):
            return 0.0
        product = math.sqrt(self.error.signal * self.found_squares)
        if product == 0:
            return 1.0 if self.error.signal == self.found_squares else 0.0
        return max(-1.0, min(1.0, self.dot / product))

    @property
    def kl(self) -> float | None:
        """KL divergence of the other side's histogram from the reference's, in nats."""
        if self.reference_bins is None or self.found_bins is None:
            return None
        # Half a count in every bin (Jeffreys' prior), so that an empty one is no infinity.
        p, q = (bins.double() + 0.5 for bins in (self.reference_bins, self.found_bins))
        p, q = p / p.sum(), q / q.sum()
        return max(0.0, float((p * (p / q).log()).sum()))

    @property
    def outlier_channels(self) -> tuple[int, ...]:
        """The channels whose largest value is OUTLIER times the median channel's, or more."""
        return () if self.channels is None else outliers(self.channels)


def outliers(peaks: Tensor) -> tuple[int, ...]:
    """The channels that stand out, by the largest value of each."""
    if peaks.numel() < 4:
        return ()
    median = peaks.median()
    return tuple((peaks > OUTLIER * median).nonzero().flatten().tolist()) if median > 0 else ()

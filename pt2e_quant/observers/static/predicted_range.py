"""Min and max, widened for pooled features and logits to where the next maximum is expected.

A feature map has thousands of values a channel, and much the same range in every sample. Pooled
features and logits have one value a channel, and their range follows the sample as a whole: eight
calibration samples can miss it by a quarter or by half, and what clips there is the model's
answer. So the maxima of single samples are taken as draws from a log-normal distribution, and the
range reaches up to the bound that the next draw stays below with 99 % probability. With hundreds
of samples the observed maximum lies above that bound already, and nothing is widened.

Of 16 bits one is left for values beyond the observed range, whatever the tensor: that halves a
resolution of 65536 steps, while a value that clips costs more than all rounding.
"""

from math import exp, log, sqrt
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR
from pt2e_quant.observers.observe_whole import WholeObserver
from pt2e_quant.observers.static.minmax import tensor_range

MOST = 2.0
"""The most that a range is widened by."""
HEADROOM = 2.0
"""The least factor by which a range of more than 256 integers is widened."""
LEAST_SAMPLES = 3
LEAST_SCALE = 2.0**-60
"""Its inverse and its product with a weight's scale are far from the ends of float32."""
QUANTILE = 2.3263478740408408
"""Of the standard normal distribution at 99 %."""


class PredictedRangeObserver(WholeObserver):
    """The running min and max of a tensor; of one vector a sample, widened as predicted.

    More than 256 integers cover at least twice the observed range. It takes torch.ao's other
    arguments too: `reduce_range` (use one bit less), and `is_dynamic`, which must be False.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        factory_kwargs: device and dtype of the statistics.
        eps: the least scale; torch.ao's where only 0 was seen.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.quint8,
        qscheme: torch.qscheme = torch.per_tensor_affine,
        *,
        eps: float = LEAST_SCALE,
        **kwargs: Any,
    ) -> None:
        super().__init__(dtype, qscheme, eps=eps, **kwargs)

    def make_statistics(self) -> None:
        """Register the running range."""
        self.require_qscheme(PER_TENSOR)
        self.require_static()
        self.is_vector = True
        self.sample_maxima: list[float] = []
        self.register_buffer("min_val", torch.tensor(torch.inf, **self.factory_kwargs))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **self.factory_kwargs))

    def add(self, x_orig: Tensor) -> None:
        """Widen the running range by x_orig, note each sample's maximum."""
        x = self.observable(x_orig)
        if x is not None:
            low, high = tensor_range(x, self.ignore_at_or_below)
            torch.minimum(self.min_val, low.to(self.min_val), out=self.min_val)
            torch.maximum(self.max_val, high.to(self.max_val), out=self.max_val)
            self._note_maxima(x)

    def _note_maxima(self, x: Tensor) -> None:
        self.is_vector = self.is_vector and is_vector(x)
        if self.is_vector and self.ignore_at_or_below is None:
            self.sample_maxima += x.reshape(len(x), -1).abs().amax(1).tolist()

    def set_extremes(self, low: Tensor, high: Tensor) -> None:
        """Take the least and the greatest value of each sample in the place of what was seen."""
        self.min_val.copy_(low.min())
        self.max_val.copy_(high.max())
        if self.is_vector:
            self.sample_maxima = torch.maximum(-low, high).tolist()

    @property
    def margin(self) -> float:
        """By how much the observed range is widened, from 1 to MOST."""
        predicted = range_margin(self.sample_maxima) if self.is_vector else 1.0
        return max(predicted, self._headroom)

    @property
    def _headroom(self) -> float:
        return HEADROOM if self.quant_max - self.quant_min > 255 else 1.0

    @property
    def steps(self) -> list[str]:
        """The change made to the observed range, for the provenance record."""
        if self.margin == self._headroom > 1.0:
            return [f"range x{HEADROOM:.3g}: 16 bits leave one for what calibration did not see"]
        return margin_step(self.margin, len(self.sample_maxima))

    def find_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the widened range, both [1]."""
        margin = self.margin
        scale, zero_point = self.qparams_of(self.min_val * margin, self.max_val * margin)
        is_dead = (self.min_val == 0) & (self.max_val == 0)
        return torch.where(is_dead, scale.clamp(min=DEFAULT_EPS), scale), zero_point

    def reset_min_max_vals(self) -> None:
        """Forget all statistics."""
        self._observed_once = False
        self.is_vector = True
        self.sample_maxima.clear()
        self.min_val.fill_(torch.inf)
        self.max_val.fill_(-torch.inf)


def is_vector(x: Tensor) -> bool:
    """True if a batch holds one value for each channel and sample: [N, C], [N, C, 1, 1]."""
    return x.dim() >= 2 and x[0, 0].numel() == 1


def range_margin(sample_maxima: list[float]) -> float:
    """By how much to widen the range of one vector a sample, from 1 to MOST."""
    found = [m for m in sample_maxima if m > 0]
    if len(found) < LEAST_SAMPLES:
        return 1.0
    return min(max(prediction_bound(found) / max(found), 1.0), MOST)


def margin_step(margin: float, samples: int) -> list[str]:
    """A line for the provenance record, if there is a margin."""
    if margin == 1.0:
        return []
    return [f"range x{margin:.3g}: 99 % bound of the next maximum after {samples} samples"]


def prediction_bound(values: list[float]) -> float:
    """Return the bound below which the next of log-normal values stays with 99 % probability.

    The quantile of Student's t is expanded around the normal one (Abramowitz and Stegun 26.7.5).
    """
    logs = [log(v) for v in values]
    count, free = len(logs), len(logs) - 1
    mean = sum(logs) / count
    deviation = sqrt(sum((v - mean) ** 2 for v in logs) / free)
    z = QUANTILE
    student = z + (z**3 + z) / (4 * free) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
    return exp(mean + student * deviation * sqrt(1 + 1 / count))

"""What each channel did in each sample, kept for algorithms that move range between channels."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR, UniformQuantizationObserverBase
from pt2e_quant.observers.static.minmax import tensor_range
from pt2e_quant.observers.static.predicted_range import is_vector, margin_step, range_margin

__all__ = ["ChannelStatistics", "ChannelStatisticsObserver"]

MAX_BLOCKS = 64
"""Blocks of rows kept apart; neighbours merge when there are more, so memory stays bounded."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Statistics of the channels of a tensor [..., C], by block of rows (a sample, or several).

    Args:
        low: least value of each channel in each block, [blocks, C].
        high: greatest value, [blocks, C].
        mean_square: of each channel over all rows, [C].
        rows_per_block: how many rows a block has on average.
    """

    low: Tensor
    high: Tensor
    mean_square: Tensor
    rows_per_block: float

    @property
    def absmax(self) -> Tensor:
        """The greatest magnitude of each channel, [C]."""
        return torch.maximum(-self.low.amin(0), self.high.amax(0)).clamp(min=0.0)


class ChannelStatisticsObserver(UniformQuantizationObserverBase):
    """Per-tensor qparams from the running range, and statistics of the last axis beside it.

    SmoothQuant and kin read `statistics`; `scale_channels` tells the observer what they did to
    the tensor. The range itself is that of PredictedRangeObserver.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        reduce_range: use one bit less; give quant_min and quant_max instead.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        factory_kwargs: device and dtype of the statistics.
        eps: the least scale.
        is_dynamic: must be False.
    """

    low: Tensor
    high: Tensor
    square_sum: Tensor

    def __init__(
        self,
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
        self.scalings: list[str] = []
        self.has_one_width = True
        self.is_vector = True
        self.rows = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        self.register_buffer("min_val", torch.tensor(torch.inf, **self.factory_kwargs))
        self.register_buffer("max_val", torch.tensor(-torch.inf, **self.factory_kwargs))
        for name in ("low", "high", "square_sum"):
            self.register_buffer(name, torch.tensor([], **self.factory_kwargs), persistent=False)

    def forward(self, x_orig: Tensor) -> Tensor:
        """Gather the range and each channel's statistics; returns x_orig."""
        x = self.observable(x_orig)
        if x is not None and self.ignore_at_or_below is not None:
            self.is_vector = False
            self._widen(*tensor_range(x, self.ignore_at_or_below))
        elif x is not None:
            self.is_vector = self.is_vector and is_vector(x)
            self._gather(as_blocks(x).to(self.min_val.dtype))
        return x_orig

    def _widen(self, low: Tensor, high: Tensor) -> None:
        torch.minimum(self.min_val, low.to(self.min_val), out=self.min_val)
        torch.maximum(self.max_val, high.to(self.max_val), out=self.max_val)

    def _gather(self, blocks: Tensor) -> None:
        squares = blocks.square().sum((0, 1))  # torch.linalg.vector_norm takes ten times as long
        if self.square_sum.numel() not in (0, squares.numel()):
            # Tensors of several shapes share this group: its last axis is no one thing.
            self.has_one_width = self.is_vector = False
            self._widen(blocks.amin(), blocks.amax())
            return
        self.square_sum = squares + self.square_sum if self.rows else squares
        self.rows += blocks.shape[0] * blocks.shape[1]
        self._pending.append((blocks.amin(1), blocks.amax(1)))
        if len(self._pending) >= MAX_BLOCKS:
            self._settle()

    def _settle(self) -> None:
        """Take in what the last calls left: many small tensors at once cost far less."""
        if not self._pending:
            return
        lows, highs = zip(*self._pending, strict=True)
        self._pending.clear()
        self._widen(torch.cat(lows).min(), torch.cat(highs).max())
        self.low = torch.cat((self.low, *lows) if self.low.numel() else lows)
        self.high = torch.cat((self.high, *highs) if self.high.numel() else highs)
        while self.low.shape[0] > MAX_BLOCKS:
            self.low, self.high = merged(self.low, torch.amin), merged(self.high, torch.amax)

    @property
    def seen(self) -> bool:
        """Whether any data has come in."""
        self._settle()
        return super().seen

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity came in: it stays in the sums of squares."""
        if self.rows and torch.isfinite(self.square_sum.sum()).item():
            return
        self._settle()
        super().check_finite()

    def statistics(self) -> ChannelStatistics | None:
        """The channels' statistics; None without data, or where widths differed."""
        if self.rows == 0 or not self.has_one_width:
            return None
        self._settle()
        return ChannelStatistics(
            low=self.low,
            high=self.high,
            mean_square=self.square_sum / self.rows,
            rows_per_block=self.rows / self.low.shape[0],
        )

    def scale_channels(self, factors: Tensor, step: str) -> None:
        """Multiply each channel's statistics by a positive factor, as was done to the tensor.

        Args:
            factors: [C], greater than 0.
            step: what was done, for the provenance record.
        """
        self._settle()
        self.low, self.high = self.low * factors, self.high * factors
        self.square_sum = self.square_sum * factors.square()
        self.min_val.copy_(self.low.min())
        self.max_val.copy_(self.high.max())
        self.scalings.append(step)

    @property
    def sample_maxima(self) -> list[float]:
        """The greatest magnitude in each block."""
        self._settle()
        if not self.low.numel():
            return []
        return torch.maximum(-self.low.amin(1), self.high.amax(1)).tolist()

    @property
    def margin(self) -> float:
        """By how much the observed range is widened."""
        return range_margin(self.sample_maxima) if self.is_vector else 1.0

    @property
    def steps(self) -> list[str]:
        """What was done to the tensor and to its range, for the provenance record."""
        return [*self.scalings, *margin_step(self.margin, self.low.shape[0])]

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the range, widened where it is predicted, both [1]."""
        self._settle()
        margin = self.margin
        return self.qparams_of(self.min_val * margin, self.max_val * margin)

    def reset_min_max_vals(self) -> None:
        """Forget all statistics."""
        self._observed_once = False
        self.has_one_width = self.is_vector = True
        self.rows = 0
        self._pending.clear()
        self.min_val.fill_(torch.inf)
        self.max_val.fill_(-torch.inf)
        self.low, self.high = self.low[:0], self.high[:0]
        self.square_sum = self.square_sum[:0]

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super()._save_to_state_dict(*args, **kwargs)


def as_blocks(x: Tensor) -> Tensor:
    """[..., C] as [blocks, rows, C]: an index of the first axis is a block."""
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def merged(values: Tensor, reduce: Any) -> Tensor:
    """Each two neighbouring rows as one; a last odd row stays."""
    even = values.shape[0] // 2 * 2
    pairs = values[:even].view(even // 2, 2, -1)
    return torch.cat((reduce(pairs, 1), values[even:]))

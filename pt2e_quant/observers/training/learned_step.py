"""First values for learned ranges, as LSQ and LSQ+ choose them.

Give these to LearnableFakeQuantize as `observer=`. LSQ+ starts activations at the range of least
squared error instead: that is MSEObserver.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import PER_TENSOR, UniformQuantizationObserverBase, is_per_channel


class FirstStepObserver(UniformQuantizationObserverBase):
    """An observer that chooses a step size from moments, averaged over the batches it sees.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per tensor or per channel, affine or symmetric.
        quant_min: least integer used; the dtype's own if None.
        quant_max: greatest integer used; the dtype's own if None.
        ch_axis: the axis of the channels.
        eps: the least scale.
        is_dynamic: must be False.
    """

    step: Tensor
    batches: Tensor

    def __init__(
        self,
        dtype: torch.dtype = torch.qint8,
        qscheme: torch.qscheme = torch.per_tensor_symmetric,
        quant_min: int | None = None,
        quant_max: int | None = None,
        ch_axis: int = 0,
        eps: float = DEFAULT_EPS,
        is_dynamic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            dtype=dtype,
            qscheme=qscheme,
            quant_min=quant_min,
            quant_max=quant_max,
            eps=eps,
            is_dynamic=is_dynamic,
            **kwargs,
        )
        channels = (torch.per_channel_symmetric, torch.per_channel_affine)
        self.require_qscheme(PER_TENSOR + channels)
        self.require_static()
        self.ch_axis = ch_axis
        empty = torch.empty(0) if is_per_channel(qscheme) else torch.tensor(torch.inf)
        self.register_buffer("min_val", empty)
        self.register_buffer("max_val", -empty)
        self.register_buffer("step", torch.zeros(1))
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64))

    def forward(self, x_orig: Tensor) -> Tensor:
        """Take the step of x_orig into the average; returns x_orig."""
        x = self.observable(x_orig)
        if x is None:
            return x_orig
        x = x.float()
        rows = x.movedim(self.ch_axis, 0).flatten(1) if is_per_channel(self.qscheme) else None
        rows = x.reshape(1, -1) if rows is None else rows
        found = self.step_of(rows)
        low, high = rows.amin(1), rows.amax(1)
        self.batches.add_(1)
        if self.step.shape != found.shape or self.min_val.shape != low.shape:
            self.step, self.min_val, self.max_val = found, low, high
        else:  # no branch on the number of batches, and the same buffers: for compilers
            moved = self.step + (found - self.step) / self.batches
            self.step.copy_(torch.where(self.batches == 1, found, moved))
            self.min_val.copy_(torch.minimum(self.min_val, low))
            self.max_val.copy_(torch.maximum(self.max_val, high))
        return x_orig

    @abstractmethod
    def step_of(self, rows: Tensor) -> Tensor:
        """The step size of each row of values[C, N]."""

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The step, and the zero_point that puts the least value seen at quant_min."""
        if not self.seen:
            return self.qparams_of(self.min_val, self.max_val)
        self.check_finite()
        scale = torch.maximum(self.step, self.eps)
        if self.is_symmetric:
            fixed = self.zero_point_if_symmetric
            return scale, torch.full_like(scale, fixed, dtype=torch.int32)
        zero_point = self.quant_min - (self.min_val.clamp(max=0) / scale).round()
        return scale, zero_point.clamp(self.quant_min, self.quant_max).to(torch.int32)


class LSQObserver(FirstStepObserver):
    """2 mean(|x|) / sqrt(quant_max): S. K. Esser and others, arXiv:1902.08153, section 2.1.

    With an affine qscheme the number of steps counts, as for the unsigned data of the paper.
    """

    def step_of(self, rows: Tensor) -> Tensor:
        """The step size of each row of values[C, N]."""
        most = self.quant_max if self.is_symmetric else self.quant_max - self.quant_min
        return 2 * rows.abs().mean(1) / math.sqrt(most)


class LSQPlusWeightObserver(FirstStepObserver):
    """max(|mean - 3 std|, |mean + 3 std|) / 2**(bits - 1).

    Y. Bhalgat and others, arXiv:2004.09576, section 3.2.
    """

    def step_of(self, rows: Tensor) -> Tensor:
        """The step size of each row of values[C, N]."""
        mean, std = rows.mean(1), rows.std(1, correction=0)
        reach = torch.maximum((mean - 3 * std).abs(), (mean + 3 * std).abs())
        return reach / ((self.quant_max - self.quant_min + 1) / 2)

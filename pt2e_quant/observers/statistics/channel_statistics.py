"""Statistics of each channel in each sample, for algorithms that move range between channels."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor

from pt2e_quant.observers.statistics.base import Statistics

MAX_BLOCKS = 64
"""Blocks of rows kept apart; neighbours merge when there are more, so memory stays bounded."""


class ChannelStatistics(Statistics):
    """The range of each channel of a tensor [..., C] in each block of rows, and its mean square.

    A block is an index of the first axis (a sample), or several that were merged.
    """

    _low: Tensor
    _high: Tensor
    _square_sum: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.has_one_width = True
        self.rows = 0
        self._pending: list[tuple[Tensor, Tensor]] = []
        for name in ("_low", "_high", "_square_sum"):
            self.register_buffer(name, torch.tensor([]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Take in the channels of x; returns x."""
        if x.numel() and self.has_one_width:
            self._gather(as_blocks(x.detach()).to(torch.float32))
        return x

    def _gather(self, blocks: Tensor) -> None:
        squares = blocks.square().sum((0, 1))  # torch.linalg.vector_norm takes ten times as long
        if self._square_sum.numel() not in (0, squares.numel()):
            # Tensors of several shapes come by: their last axis is no one thing.
            self.has_one_width = False
            self._pending.clear()
            return
        self._square_sum = squares + self._square_sum if self.rows else squares
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
        self._low = torch.cat((self._low, *lows) if self._low.numel() else lows)
        self._high = torch.cat((self._high, *highs) if self._high.numel() else highs)
        while self._low.shape[0] > MAX_BLOCKS:
            self._low, self._high = merged(self._low, torch.amin), merged(self._high, torch.amax)

    @property
    def seen(self) -> bool:
        """True if any data has come in, all of one width."""
        return self.rows > 0 and self.has_one_width

    @property
    def low(self) -> Tensor:
        """The least value of each channel in each block, [blocks, C]."""
        self._settle()
        return self._low

    @property
    def high(self) -> Tensor:
        """The greatest value of each channel in each block, [blocks, C]."""
        self._settle()
        return self._high

    @property
    def mean_square(self) -> Tensor:
        """The mean square of each channel over all rows, [C]."""
        return self._square_sum / self.rows

    @property
    def rows_per_block(self) -> float:
        """The mean number of rows of a block."""
        return self.rows / self.low.shape[0]

    @property
    def absmax(self) -> Tensor:
        """The greatest magnitude of each channel, [C]."""
        return torch.maximum(-self.low.amin(0), self.high.amax(0)).clamp(min=0.0)

    def scaled(self, factors: Tensor) -> Self:
        """The statistics of the tensor with its channels multiplied by positive factors [C]."""
        made = type(self)()
        made.rows = self.rows
        made._low, made._high = self.low * factors, self.high * factors
        made._square_sum = self._square_sum * factors.square()
        return made

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._settle()
        super()._save_to_state_dict(*args, **kwargs)


def as_blocks(x: Tensor) -> Tensor:
    """[..., C] as [blocks, rows, C]: an index of the first axis is a block."""
    if x.dim() < 2:
        return x.reshape(1, 1, -1)
    return x.reshape(x.shape[0], -1, x.shape[-1])


def merged(values: Tensor, reduce: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Each two neighbouring rows as one; a last odd row stays."""
    even = values.shape[0] // 2 * 2
    pairs = values[:even].view(even // 2, 2, -1)
    return torch.cat((reduce(pairs, 1), values[even:]))

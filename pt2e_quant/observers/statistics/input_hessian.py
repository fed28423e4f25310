"""The second moments of what the rows of a weight are multiplied with."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from pt2e_quant.observers.statistics.base import Statistics


@dataclass(frozen=True, slots=True)
class Window:
    """The window of a convolution.

    Args:
        kernel: its size along each spatial axis.
        stride: one number an axis, as the others.
        padding: zeros before and after each axis.
        dilation: the distance of neighbours in the window.
        groups: groups of input channels.
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int


class InputHessian(Statistics):
    """H = 2 / n * sum of x x^T over n rows x: the Hessian of a linear's squared output error.

    A convolution is a linear of its windows, one for each group (Frantar et al. 2022, OBC,
    section 4, for both). Memory: one float32 matrix of the weight's row length for each group.

    Args:
        window: of a convolution; None for a linear.
    """

    _sum: Tensor

    def __init__(self, window: Window | None = None) -> None:
        super().__init__()
        self.window = window
        self.rows = 0
        self._is_finite = True
        self.register_buffer("_sum", torch.tensor([]), persistent=False)

    @property
    def settings(self) -> object:
        """The window."""
        return self.window

    def forward(self, x: Tensor) -> Tensor:
        """Take in the rows of x; returns x."""
        if x.numel():
            limits = torch.stack(x.detach().aminmax())
            self._is_finite = self._is_finite and bool(limits.isfinite().all())
            rows = rows_of(x.detach().to(torch.float32), self.window)
            product = rows.transpose(1, 2) @ rows
            self._sum = self._sum + product if self.rows else product
            self.rows += rows.shape[1]
        return x

    @property
    def seen(self) -> bool:
        """True if any data has come in."""
        return self.rows > 0

    @property
    def is_finite(self) -> bool:
        """True if no NaN and no infinity came in; squares of finite values may overflow."""
        return self._is_finite

    @property
    def hessian(self) -> Tensor:
        """H, float32[groups, K, K]."""
        return self._sum * (2.0 / self.rows)

    def scaled(self, factors: Tensor) -> Self:
        """The Hessian of a linear's input whose channels are multiplied by factors [K]."""
        made = copy.copy(self)
        made._buffers = dict(self._buffers)
        made._sum = self._sum * factors * factors[:, None]
        return made


def rows_of(x: Tensor, window: Window | None, most: int | None = None) -> Tensor:
    """The vectors that each weight row is multiplied with, [groups, vectors, K].

    Args:
        x: the operator's input.
        window: of a convolution; None for a linear.
        most: about how many vectors to take, at even distances; None for all.
    """
    if window is None:
        rows = x.reshape(1, -1, x.shape[-1])
        return rows if most is None else rows[:, :: max(1, -(-rows.shape[1] // most))]
    dims = len(window.kernel)
    x = x.reshape(-1, *x.shape[-dims - 1 :])  # without a batch there is one
    x = F.pad(x, _in_torch_order(window.padding))
    for axis in range(dims):
        reach = (window.kernel[axis] - 1) * window.dilation[axis] + 1
        x = x.unfold(2 + axis, reach, window.stride[axis])
    for axis, step in enumerate(window.dilation):
        x = x.movedim(axis - dims, 0)[::step].movedim(0, axis - dims)
    if most is not None:
        positions = x.shape[0] * math.prod(x.shape[2 : 2 + dims])
        step = max(1, round((positions / most) ** (1 / dims)))
        for axis in range(dims):
            x = x.movedim(2 + axis, 0)[min(step, x.shape[2 + axis]) // 2 :: step].movedim(
                0, 2 + axis
            )
    # [N, C, *positions, *kernel] to [groups, N * positions, C / groups * kernel]
    x = x.reshape(x.shape[0], window.groups, -1, *x.shape[2:])
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    x = x.permute(order)
    return x.reshape(window.groups, -1, math.prod(x.shape[-dims - 1 :]))


def _in_torch_order(padding: Sequence[tuple[int, int]]) -> list[int]:
    """The padding of each axis, last axis first, as F.pad takes it."""
    return [amount for pair in reversed(padding) for amount in pair]

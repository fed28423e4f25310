"""A stand-in for the observer of an operator's input, for operators that only move data."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.observers.base import ObserverBase

__all__ = ["ReuseInputObserver"]


class ReuseInputObserver(ObserverBase):
    """Says that an output has the qparams of its operator's input.

    A SharedQuantizationSpec says so in PT2E; the class is there for scripts that name it.
    """

    def __init__(self) -> None:
        super().__init__(torch.quint8, is_dynamic=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: the input's observer has the qparams."""
        raise UnsupportedError(
            "a ReuseInputObserver has no qparams of its own",
            fix="annotate the output with a SharedQuantizationSpec of the input's edge",
        )

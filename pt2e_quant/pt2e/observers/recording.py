"""An observer that keeps every tensor it is given, for debugging."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.observers.base import ObserverBase

__all__ = ["RecordingObserver"]


class RecordingObserver(ObserverBase):
    """Keeps a copy of every tensor, in the order they came.

    Args:
        dtype: kept for scripts that set it.
    """

    def __init__(self, dtype: torch.dtype = torch.quint8) -> None:
        super().__init__(dtype=dtype, is_dynamic=False)
        self.tensor_val: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        """Keep a copy of x; returns x."""
        self.tensor_val.append(x.clone())
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: no range is gathered."""
        raise UnsupportedError("a RecordingObserver gathers no range to calculate qparams from")

    def get_tensor_value(self) -> list[Tensor]:
        """The copies, oldest first."""
        return self.tensor_val

"""Says that a tensor is quantized at run time, each of its rows on a scale of its own."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.observers.base import ObserverBase

__all__ = ["PerTokenPlaceholderObserver"]


class PerTokenPlaceholderObserver(ObserverBase):
    """Gathers nothing: `choose_qparams_per_token_asymmetric` finds the qparams at run time.

    Args:
        dtype: int8, which is what that operator gives.
        quant_min: -128.
        quant_max: 127.
        qscheme: anything: one scale a row is no qscheme of torch's.
        is_dynamic: True.

    Raises:
        ConfigError: anything else is asked for.
    """

    is_per_token = True

    def __init__(
        self,
        dtype: torch.dtype = torch.int8,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        is_dynamic: bool = True,
    ) -> None:
        super().__init__(dtype=dtype, is_dynamic=True)
        limits = (-128 if quant_min is None else quant_min, 127 if quant_max is None else quant_max)
        if dtype != torch.int8 or limits != (-128, 127) or not is_dynamic:
            raise ConfigError(
                f"per-token qparams are int8 in -128 .. 127 and dynamic, found {dtype} in "
                f"{limits[0]} .. {limits[1]}"
            )
        self.quant_min, self.quant_max = limits
        self.qscheme = qscheme

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: there are no statistics."""
        raise UnsupportedError("qparams per token are found at run time")

"""An observer whose scales are raised to powers of two, for hardware that shifts."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.minmax import MinMaxObserver

__all__ = ["PowerOfTwoObserver"]


class PowerOfTwoObserver(ObserverBase):
    """Another observer's qparams with the least power of two that is not below the scale.

    So nothing that the other covers is clipped. Zero_points move to keep the least value in place.

    Args:
        observer: makes the other; it takes the rest of the arguments.
        rest: dtype, qscheme, quant_min, quant_max, and so on.
    """

    def __init__(
        self, observer: Callable[..., Any] = MinMaxObserver, is_dynamic: bool = False, **rest: Any
    ) -> None:
        super().__init__(dtype=rest.get("dtype", torch.int8))
        if is_dynamic:
            raise ConfigError("powers of two are found by calibration or from a constant")
        self.inner = observer(**rest)
        for name in ("dtype", "qscheme", "quant_min", "quant_max", "ch_axis", "group_size"):
            if hasattr(self.inner, name):
                setattr(self, name, getattr(self.inner, name))

    def forward(self, x: Tensor) -> Tensor:
        """Show x to the other observer; returns x."""
        self.inner.observes_constant = self.observes_constant
        self.inner(x)
        return x

    @property
    def min_val(self) -> Tensor:
        """The least value seen."""
        return self.inner.min_val  # type: ignore[no-any-return]  # any observer's

    @property
    def max_val(self) -> Tensor:
        """The greatest value seen."""
        return self.inner.max_val  # type: ignore[no-any-return]

    @property
    def seen(self) -> bool:
        """Whether the other observer has the data it needs."""
        return bool(self.inner.seen)

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity is in the statistics."""
        self.inner.check_finite()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point, shaped as the other observer's."""
        scale, zero_point = self.inner.calculate_qparams()
        mantissa, exponent = torch.frexp(scale)
        raised = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        if self.inner.is_symmetric:
            return raised, zero_point
        low, high = self.inner.quant_min, self.inner.quant_max
        least = (low - zero_point) * scale
        moved = (low - torch.round(least / raised)).clamp(low, high)
        return raised, moved.to(zero_point.dtype)

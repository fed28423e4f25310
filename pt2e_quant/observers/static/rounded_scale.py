"""An observer whose scales are rounded to what hardware takes: powers of two, or fewer bits."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.observe_whole import is_traceable
from pt2e_quant.observers.static.minmax import MinMaxObserver


class RoundedScaleObserver(ObserverBase):
    """Another observer's qparams with scales that are powers of two, or that fit fewer bits.

    A power of two is the least that is not below the scale, so that nothing that the other covers
    is clipped. Zero_points move to keep the least value in place.

    Args:
        observer: makes the other; it takes the rest of the arguments.
        precision: each scale is the nearest number of this dtype; None raises it to a power of two.
        rest: dtype, qscheme, quant_min, quant_max, and so on.
    """

    def __init__(
        self,
        observer: Callable[..., Any] = MinMaxObserver,
        precision: torch.dtype | None = None,
        is_dynamic: bool = False,
        **rest: Any,
    ) -> None:
        super().__init__(dtype=rest.get("dtype", torch.int8))
        if is_dynamic:
            raise ConfigError("rounded scales are found by calibration or from a constant")
        self.precision = precision
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
    def is_traceable(self) -> bool:  # type: ignore[override]  # as the other's
        """As of the other observer."""
        return is_traceable(self.inner)

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
        """True if the other observer has the data it needs."""
        return bool(self.inner.seen)

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity is in the statistics."""
        self.inner.check_finite()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point, shaped as the other observer's."""
        scale, zero_point = self.inner.calculate_qparams()
        rounded = self._rounded(scale)
        if self.inner.is_symmetric:
            return rounded, zero_point
        low, high = self.inner.quant_min, self.inner.quant_max
        least = (low - zero_point) * scale
        moved = (low - torch.round(least / rounded)).clamp(low, high)
        return rounded, moved.to(zero_point.dtype)

    def _rounded(self, scale: Tensor) -> Tensor:
        if self.precision is not None:
            return scale.to(self.precision).to(scale.dtype)
        mantissa, exponent = torch.frexp(scale)
        return torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())

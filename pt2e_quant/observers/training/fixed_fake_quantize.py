"""Fake-quantize by qparams known beforehand."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.qschemes import PER_TENSOR
from pt2e_quant.observers.static.fixed import FixedQParamsObserver
from pt2e_quant.observers.training.fake_quantize import FakeQuantize


class FixedQParamsFakeQuantize(FakeQuantize):
    """Fake-quantize by the qparams of a FixedQParamsObserver.

    Args:
        observer: makes the FixedQParamsObserver.

    Raises:
        ConfigError: it makes another observer, or one that is not per tensor.
    """

    def __init__(self, observer: Callable[..., Any]) -> None:
        super().__init__(observer=observer)
        made = self.activation_post_process
        if not isinstance(made, FixedQParamsObserver) or self.qscheme not in PER_TENSOR:
            raise ConfigError(
                "a FixedQParamsFakeQuantize needs a per-tensor FixedQParamsObserver, found "
                f"{type(made).__name__} with {self.qscheme}"
            )
        self.scale = made.scale
        self.zero_point = made.zero_point

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The fixed scale and zero_point, both [1]."""
        return self.scale, self.zero_point

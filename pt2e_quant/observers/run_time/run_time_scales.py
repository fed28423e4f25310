"""Says that a tensor's scales are found at run time, from the greatest magnitude of each block."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.core.formats.number_formats import FloatFormat
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.base import ObserverBase

__all__ = ["RunTimeScales"]


class RunTimeScales(ObserverBase):
    """Gathers nothing: `pt2e_quant::choose_scales` finds the scales in the graph.

    Args:
        scheme: what the tensor is quantized to: a small float, or symmetric integers.
        dtype: that of the scheme.
        is_dynamic: must be True.

    Raises:
        ConfigError: such scales cannot be found so.
    """

    def __init__(
        self, scheme: TensorScheme, dtype: torch.dtype | None = None, is_dynamic: bool = True
    ) -> None:
        super().__init__(dtype=dtype or scheme.dtype, is_dynamic=True)
        has_codes = scheme.format is None or isinstance(scheme.format, FloatFormat)
        signed = scheme.symmetric and scheme.range[0] < 0 if scheme.format is None else True
        if not (is_dynamic and has_codes and signed) or scheme.scales.double_group is not None:
            raise ConfigError(
                "scales found at run time are of small floats or symmetric integers, found "
                f"{scheme}"
            )
        if scheme.scales.is_power_of_two and scheme.scales.dtype != torch.float8_e8m0fnu:
            raise ConfigError("powers of two are found at run time in float8_e8m0fnu alone")
        self.scheme = scheme

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: there are no statistics."""
        raise UnsupportedError("scales are found at run time")

"""The observer of an activation that becomes small floats on one scale found by calibration."""

import torch
from torch import Tensor

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.granularity import PerTensor
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.base import ObserverBase
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.weights.block_search import qparams_of_amax


class FloatActivationObserver(ObserverBase):
    """Keeps the least and greatest value; the scale makes the greater magnitude the greatest code.

    Args:
        scheme: what the tensor is quantized to: a small float, per tensor.
        dtype: that of the scheme.
        is_dynamic: must be False.

    Raises:
        ConfigError: the scheme is another.
    """

    def __init__(
        self, scheme: TensorScheme, dtype: torch.dtype | None = None, is_dynamic: bool = False
    ) -> None:
        super().__init__(dtype=dtype or scheme.dtype)
        whole = scheme.granularity == PerTensor()
        if is_dynamic or scheme.format is None or not whole or scheme.scales.in_tensor_units:
            raise ConfigError(
                f"static activations that are no plain integers are small floats per tensor, "
                f"found {scheme}",
                fix="a dynamic scheme",
            )
        self.scheme = scheme
        # Its integers are never used: it gathers the range, and knows how to.
        self.range = MinMaxObserver(dtype=torch.int8, qscheme=torch.per_tensor_symmetric)
        self.dim = 0

    def forward(self, x: Tensor) -> Tensor:
        """Widen the range; returns x."""
        self.dim = x.dim()
        self.range(x)
        return x

    @property
    def min_val(self) -> Tensor:
        """The least value seen."""
        return self.range.min_val

    @property
    def max_val(self) -> Tensor:
        """The greatest value seen."""
        return self.range.max_val

    @property
    def seen(self) -> bool:
        """True if any data has come in."""
        return self.range.seen

    def check_finite(self) -> None:
        """Raise NonFinite if a NaN or infinity came in."""
        self.range.check_finite()

    def block_qparams(self, dim: int | None = None) -> BlockQParams:
        """The qparams of a tensor of `dim` dimensions, of the last one seen if None.

        Raises:
            CalibrationError: no data has come in.
        """
        if not self.seen:
            raise CalibrationError("a FloatActivationObserver saw no data")
        self.check_finite()
        amax = torch.maximum(-self.min_val, self.max_val)
        return qparams_of_amax(amax, self.scheme, self.dim if dim is None else dim)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scale, and 0."""
        scale = self.block_qparams().scale
        assert scale is not None
        return scale.real().reshape(1), torch.zeros(1, dtype=torch.int32)

"""The observer of a constant weight whose qparams are in blocks, or whose codes are no integers."""

import math

import torch
from torch import Tensor

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.formats.block_qparams import BlockQParams
from pt2e_quant.core.formats.blocks import block_lengths
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.base import NonFinite, ObserverBase
from pt2e_quant.observers.weights.block_search import Ends, find_block_qparams, find_ends
from pt2e_quant.observers.weights.weight_search import WeightSearch


class BlockWeightObserver(ObserverBase):
    """Finds the qparams of a weight when it sees it; the last one seen counts.

    Nothing of it is in a state dict: convert shows it its constant again.

    Args:
        scheme: what the weight is quantized to.
        dtype: that of the scheme.
        search: how scales are found.
        is_dynamic: must be False.

    Raises:
        ConfigError: it is asked to be dynamic; or, at a weight, its blocks do not fit.
        NonFinite: at a weight that holds NaN or infinity.
    """

    min_val: Tensor
    max_val: Tensor

    def __init__(
        self,
        scheme: TensorScheme,
        dtype: torch.dtype | None = None,
        search: WeightSearch = WeightSearch.MIN_MAX,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype=dtype or scheme.dtype)
        if is_dynamic:
            raise ConfigError("a constant weight is not quantized at run time")
        self.scheme = scheme
        self.search = search
        self.found: BlockQParams | None = None
        self.min_val = torch.tensor([])
        self.max_val = torch.tensor([])

    def forward(self, x: Tensor) -> Tensor:
        """Find the qparams of x; returns x."""
        if (self.observes_constant and self.seen) or x.numel() == 0:
            return x
        value = x.detach()
        low, high, ends = self._ends(value)
        if not (math.isfinite(low.item()) and math.isfinite(high.item())):
            raise NonFinite("NaN or infinity in a weight", fix="find what made it")
        self.min_val, self.max_val = low, high
        self.found = find_block_qparams(value, self.scheme, self.search, ends)
        return x

    def _ends(self, value: Tensor) -> tuple[Tensor, Tensor, Ends | None]:
        """The range of a weight, as float32, and of its blocks where those alone were read."""
        block = block_lengths(self.scheme.granularity, value.dim())
        is_padded = any(n > 0 and size % n for size, n in zip(value.shape, block, strict=True))
        if self.scheme.format is None or is_padded:
            return value.amin().to(torch.float32), value.amax().to(torch.float32), None
        low, high = find_ends(value, self.scheme)
        return low.amin(), high.amax(), (low, high)

    @property
    def seen(self) -> bool:
        """True if a weight has come in."""
        return self.found is not None

    def block_qparams(self) -> BlockQParams:
        """The qparams found.

        Raises:
            CalibrationError: no weight has come in.
        """
        if self.found is None:
            raise CalibrationError("a BlockWeightObserver saw no weight")
        return self.found

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """The scales in force (of a fitted table: 1) and the zero_points (0 if it has none)."""
        found = self.block_qparams()
        scale = torch.ones(1) if found.scale is None else found.scale.real()
        zero = found.zero_point
        return scale, torch.zeros_like(scale, dtype=torch.int32) if zero is None else zero

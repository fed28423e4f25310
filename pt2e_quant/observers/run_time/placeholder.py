"""Observers that gather nothing: they carry a configuration through the graph."""

import warnings

import torch
from torch import Tensor

from pt2e_quant.core.errors import Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.observers.base import ObserverBase

__all__ = ["NoopObserver", "PlaceholderObserver"]


class PlaceholderObserver(ObserverBase):
    """Says how a tensor is to be quantized at run time (dynamic), or to which float dtype.

    Args:
        dtype: dtype to quantize to.
        custom_op_name: kept for scripts that set it.
        compute_dtype: deprecated; give is_dynamic=True instead.
        quant_min: least integer used.
        quant_max: greatest integer used.
        qscheme: per_tensor_affine if None.
        eps: the least scale.
        is_dynamic: qparams are computed at run time.
    """

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        custom_op_name: str = "",
        compute_dtype: torch.dtype | None = None,
        quant_min: int | None = None,
        quant_max: int | None = None,
        qscheme: torch.qscheme | None = None,
        eps: float | None = None,
        is_dynamic: bool = False,
    ) -> None:
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.qscheme = torch.per_tensor_affine if qscheme is None else qscheme
        self.quant_min = quant_min
        self.quant_max = quant_max
        self.eps = DEFAULT_EPS if eps is None else eps
        self.custom_op = custom_op_name
        if compute_dtype:
            self.is_dynamic = True
            warnings.warn(
                "compute_dtype is deprecated: give is_dynamic=True instead",
                Pt2eQuantWarning,
                stacklevel=2,
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: there are no statistics."""
        raise UnsupportedError("a PlaceholderObserver gathers nothing to calculate qparams from")

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"dtype={self.dtype}, is_dynamic={self.is_dynamic}"


class NoopObserver(ObserverBase):
    """Says to which float dtype a tensor is to be converted.

    Args:
        dtype: dtype to convert to.
        custom_op_name: kept for scripts that set it.
    """

    def __init__(self, dtype: torch.dtype = torch.float16, custom_op_name: str = "") -> None:
        super().__init__(dtype=dtype, is_dynamic=False)
        self.custom_op = custom_op_name

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Always refused: there are no statistics."""
        raise UnsupportedError("a NoopObserver gathers nothing to calculate qparams from")

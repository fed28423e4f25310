"""Observers that gather nothing: they carry a configuration through the graph."""

import warnings

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.formats.number_formats import FloatFormat
from pt2e_quant.core.qparams import DEFAULT_EPS
from pt2e_quant.core.schemes import TensorScheme
from pt2e_quant.observers.base import ObserverBase


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

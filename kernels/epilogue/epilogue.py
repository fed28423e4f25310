"""The epilogue of a sum of products: the last arguments of every fused operator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, InputError

INTEGER_OUTPUTS = (torch.int8, torch.uint8)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_ADDED = (*INTEGER_OUTPUTS, *_FLOATS)
_CODES = (*INTEGER_OUTPUTS, torch.float8_e4m3fn)

OUTPUT_SCHEMA = (
    'str activation="none", float[] limits=[], ScalarType out_dtype=float, '
    "float out_scale=1.0, int out_zero_point=0, int out_min=-128, int out_max=127"
)
"""The fields from the activation on, in a `torch.library` schema."""

EPILOGUE_SCHEMA = (
    "Tensor? bias=None, Tensor? residual=None, float residual_scale=1.0, "
    f"int residual_zero_point=0, {OUTPUT_SCHEMA}"
)
"""All the fields, in a `torch.library` schema; `Epilogue(*args)` reads them back."""


class Activation(StrEnum):
    """A pointwise function, in float32."""

    NONE = "none"
    RELU = "relu"
    CLAMP = "clamp"
    """To limits (low, high): relu6, hardtanh, clamp."""
    LEAKY_RELU = "leaky_relu"
    """limits is (negative slope,)."""
    GELU = "gelu"
    GELU_TANH = "gelu_tanh"
    SILU = "silu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    HARDSWISH = "hardswish"


_LIMITS = {Activation.CLAMP: 2, Activation.LEAKY_RELU: 1}


@dataclass(frozen=True, slots=True, eq=False)
class Epilogue:
    """The steps on a sum, in this order, each rounded to float32.

    real = sum * scale;  real += bias;  real += residual;  real = activation(real);  then one of
    a cast to a float dtype (to the nearest, ties to even);
    clamp(round(real * (1 / out_scale)) + out_zero_point, out_min, out_max), ties to even;
    the float8_e4m3fn nearest to real / out_scale, ties to even, saturated; a NaN stays NaN.

    Args:
        bias: a float dtype[N], in real units.
        residual: what is added, of the result's shape: integers with the qparams that follow, or
            floats.
        residual_scale: real units per integer step of an integer residual.
        residual_zero_point: the integer that stands for 0.0.
        activation: the pointwise function.
        limits: its numbers.
        out_dtype: int8, uint8, float8_e4m3fn, float32, float16 or bfloat16.
        out_scale: real units per integer step of an integer result, or of 1.0 in float8_e4m3fn.
        out_zero_point: the integer that stands for 0.0.
        out_min: least integer.
        out_max: greatest integer.

    Raises:
        ConfigError: a dtype or a number that no kernel takes.
        InputError: a bias or a residual of a dtype that no kernel takes.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    residual_scale: float = 1.0
    residual_zero_point: int = 0
    activation: str = Activation.NONE
    limits: Sequence[float] = ()
    out_dtype: torch.dtype = torch.float32
    out_scale: float = 1.0
    out_zero_point: int = 0
    out_min: int = -128
    out_max: int = 127

    def __post_init__(self) -> None:
        activation = Activation(self.activation)
        wanted = _LIMITS.get(activation, 0)
        if len(self.limits) != wanted:
            raise ConfigError(f"{activation} takes {wanted} limits, found {list(self.limits)}")
        if self.out_dtype not in (*_CODES, *_FLOATS):
            raise ConfigError(f"a fused operator writes no {self.out_dtype}")
        if self.is_quantized and not (self.out_scale > 0 and math.isfinite(1.0 / self.out_scale)):
            raise ConfigError(f"the scale of a result must be positive, found {self.out_scale}")
        added = ("bias", self.bias, _FLOATS), ("residual", self.residual, _ADDED)
        for name, tensor, allowed in added:
            if tensor is not None and tensor.dtype not in allowed:
                raise InputError(f"a fused operator adds no {name} in {tensor.dtype}")

    @property
    def is_integer(self) -> bool:
        """True if the result is requantized."""
        return self.out_dtype in INTEGER_OUTPUTS

    @property
    def is_quantized(self) -> bool:
        """True if the result is in units of out_scale: integers, or 8-bit floats."""
        return self.out_dtype in _CODES

    @property
    def inverse_scale(self) -> float:
        """1 / out_scale in double precision; it is rounded to float32 where it is used."""
        return 1.0 / self.out_scale

    @property
    def scaling(self) -> float:
        """The number from a result to its codes: a factor for integers, a divisor for floats."""
        return self.inverse_scale if self.is_integer else self.out_scale

"""Named quantization schemes: which integers each role of an operator's tensors gets."""

from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.formats.number_formats import NumberFormat
from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES, ScaleFormat
from pt2e_quant.core.granularity import Granularity, PerBlock, PerChannel, PerTensor


class Role(StrEnum):
    """The role of a tensor for the operator that reads or makes it."""

    INPUT = "input"
    WEIGHT = "weight"
    BIAS = "bias"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorScheme:
    """The quantization of one tensor.

    Args:
        dtype: the integer type; with a format, the type of its codes.
        granularity: what shares one scale.
        symmetric: zero_point is 0 (signed) or the middle (unsigned).
        quant_min: smallest integer used; the type's own by default.
        quant_max: largest integer used; the type's own by default.
        is_dynamic: qparams are chosen at run time from the tensor itself.
        format: what the codes stand for; None if they are the integers of dtype.
        scales: how the scales are kept.

    Raises:
        ValueError: the integer range does not fit the type, or the type the format.
    """

    dtype: torch.dtype
    granularity: Granularity
    symmetric: bool
    quant_min: int | None = None
    quant_max: int | None = None
    is_dynamic: bool = False
    format: NumberFormat | None = None
    scales: ScaleFormat = FLOAT32_SCALES

    def __post_init__(self) -> None:
        if self.format is not None:
            if self.dtype != self.format.code_dtype or not self.symmetric:
                raise ValueError(
                    f"{self.format} is symmetric and has codes of {self.format.code_dtype}, "
                    f"not {self.dtype}"
                )
            return
        own = info(self.dtype)
        low, high = self.range
        if not own.quant_min <= low < high <= own.quant_max:
            raise ValueError(
                f"range [{low}, {high}] does not fit {self.dtype}: "
                f"expected within [{own.quant_min}, {own.quant_max}]"
            )

    @property
    def range(self) -> tuple[int, int]:
        """(quant_min, quant_max) with the type's own limits filled in; with a format, of codes."""
        if self.format is not None:
            return 0, (1 << self.format.bits) - 1
        own = info(self.dtype)
        low = own.quant_min if self.quant_min is None else self.quant_min
        high = own.quant_max if self.quant_max is None else self.quant_max
        return low, high

    @property
    def is_full_int8(self) -> bool:
        """True if these are the 256 integers of int8, symmetric around 0."""
        return self.format is None and self.symmetric and self.range == (-128, 127)

    def narrowed(self) -> "TensorScheme":
        """The same without the least integer, as products of integers want it: -127 .. 127.

        >>> str(INT8_WEIGHT_ONLY.narrowed())
        'int8[-127, 127] symmetric PerChannel(axis=0)'
        """
        low, high = self.range
        return replace(self, quant_min=max(low, -high))

    @property
    def bits(self) -> int:
        """Width of one code."""
        return info(self.dtype).bits if self.format is None else self.format.bits

    @property
    def is_plain(self) -> bool:
        """True if quantized_decomposed can say it: integers, float32 scales, no blocks."""
        is_block = isinstance(self.granularity, PerBlock)
        return self.format is None and self.scales.is_plain and not is_block

    def fits(self, accepted: "TensorScheme") -> bool:
        """True if a slot that accepts `accepted` can take this scheme.

        A narrower range fits a wider one, symmetric fits affine, powers of two and rounded scales
        fit any scales of their dtype; the rest must be equal.
        """
        low, high = self.range
        accepted_low, accepted_high = accepted.range
        return (
            self.dtype == accepted.dtype
            and self.granularity == accepted.granularity
            and self.is_dynamic == accepted.is_dynamic
            and accepted_low <= low
            and high <= accepted_high
            and (self.symmetric or not accepted.symmetric)
            and self.format == accepted.format
            and self.scales.fits(accepted.scales)
        )

    def __str__(self) -> str:
        scales = "" if self.scales == FLOAT32_SCALES else f", {self.scales}"
        if self.format is not None:
            dynamic = " dynamic" if self.is_dynamic else ""
            return f"{self.format}{dynamic} {self.granularity}{scales}"
        low, high = self.range
        kind = "symmetric" if self.symmetric else "affine"
        dynamic = " dynamic" if self.is_dynamic else ""
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{low}, {high}] {kind}{dynamic} {self.granularity}{scales}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A tensor scheme per role; None leaves that role float."""

    name: str
    input: TensorScheme | None
    output: TensorScheme | None
    weight: TensorScheme | None
    bias: TensorScheme | None = None

    def for_role(self, role: Role) -> TensorScheme | None:
        """The tensor scheme of one role."""
        by_role = {
            Role.INPUT: self.input,
            Role.OUTPUT: self.output,
            Role.WEIGHT: self.weight,
            Role.BIAS: self.bias,
        }
        return by_role[role]


INT8_ACTIVATION = TensorScheme(dtype=torch.int8, granularity=PerTensor(), symmetric=False)
UINT8_ACTIVATION = TensorScheme(dtype=torch.uint8, granularity=PerTensor(), symmetric=False)
INT8_WEIGHT = TensorScheme(
    dtype=torch.int8,
    granularity=PerChannel(axis=0),
    symmetric=True,
    quant_min=-127,
    quant_max=127,
)
"""Weights that are multiplied with integers: kernels may add two products in 16 bits."""
INT8_WEIGHT_ONLY = TensorScheme(dtype=torch.int8, granularity=PerChannel(axis=0), symmetric=True)
"""Weights that are multiplied with real numbers."""
INT8_WEIGHT_ROWS = TensorScheme(dtype=torch.int8, granularity=PerChannel(axis=0), symmetric=False)
BIAS_INT32 = TensorScheme(dtype=torch.int32, granularity=PerChannel(axis=0), symmetric=True)

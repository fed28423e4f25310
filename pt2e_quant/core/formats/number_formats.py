"""Number formats of codes that are not evenly spaced integers: small floats and code books.

Small floats are those of OCP's "8-bit Floating Point Specification" (OFP8, 2023) and of its
"Microscaling Formats Specification v1.0" (MX, 2023). A code book gives the real value of each code.
"""

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError, UnsupportedError, near


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatFormat:
    """A float of 8 bits or less: sign, exponent, mantissa, with subnormals.

    Attributes:
        name: as torch and OCP write it.
        exponent_bits: width of the exponent.
        mantissa_bits: width of the mantissa.
        bias: of the exponent.
        max: the greatest finite value. Greater ones saturate to it, infinities too.
        has_nan: whether a code is NaN; without one a NaN has no code and becomes 0, and only its
            block's scale can carry it.
        storage: what holds a code: the float8 type itself, or uint8 with the bits at its low end.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    has_nan: bool
    storage: torch.dtype

    @property
    def bits(self) -> int:
        """Width of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @property
    def min_exponent(self) -> int:
        """The exponent of the least normal number."""
        return 1 - self.bias

    @property
    def code_dtype(self) -> torch.dtype:
        """The dtype that names a code: the float8 type, or the unsigned integer of its width."""
        if self.storage != torch.uint8:
            return self.storage
        named: torch.dtype = getattr(torch, f"uint{self.bits}")
        return named

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeBook:
    """Codes that are places in a table of real values.

    Attributes:
        name: for people and files.
        bits: width of a code; the table has at most 2 ** bits values.
        values: in rising order; empty where each tensor, or each block, has a table fitted to it.

    Raises:
        ConfigError: the values do not ascend, or are too many or too few for the width.
    """

    name: str
    bits: int
    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 8:
            raise ConfigError(f"codes have 1 to 8 bits, found {self.bits}")
        if not self.values:
            return
        if not 2 <= len(self.values) <= 1 << self.bits:
            raise ConfigError(
                f"a table of {self.bits} bits has 2 to {1 << self.bits} values, found "
                f"{len(self.values)}"
            )
        pairs = zip(self.values, self.values[1:], strict=False)
        if not all(low < high for low, high in pairs):
            raise ConfigError(f'the values of code book "{self.name}" are not in ascending order')

    @property
    def is_fitted(self) -> bool:
        """True if the table is made for each tensor."""
        return not self.values

    @property
    def max(self) -> float:
        """The greatest magnitude in the table; 1 if it is fitted."""
        return max((abs(value) for value in self.values), default=1.0)

    @property
    def storage(self) -> torch.dtype:
        """The dtype that holds a code."""
        return torch.uint8

    @property
    def code_dtype(self) -> torch.dtype:
        """The unsigned integer of a code's width."""
        named: torch.dtype = getattr(torch, f"uint{self.bits}")
        return named

    def table(self) -> Tensor:
        """The values as float32[K].

        Raises:
            ConfigError: it has none of its own.
        """
        if self.is_fitted:
            raise ConfigError(f'code book "{self.name}" is fitted to each tensor')
        return torch.tensor(self.values, dtype=torch.float32)

    def __str__(self) -> str:
        return self.name


NumberFormat = FloatFormat | CodeBook

FP8_E4M3 = FloatFormat(
    name="float8_e4m3fn",
    exponent_bits=4,
    mantissa_bits=3,
    bias=7,
    max=448.0,
    has_nan=True,
    storage=torch.float8_e4m3fn,
)
FP8_E5M2 = FloatFormat(
    name="float8_e5m2",
    exponent_bits=5,
    mantissa_bits=2,
    bias=15,
    max=57344.0,
    has_nan=True,
    storage=torch.float8_e5m2,
)
FP6_E2M3 = FloatFormat(
    name="float6_e2m3fn",
    exponent_bits=2,
    mantissa_bits=3,
    bias=1,
    max=7.5,
    has_nan=False,
    storage=torch.uint8,
)
FP6_E3M2 = FloatFormat(
    name="float6_e3m2fn",
    exponent_bits=3,
    mantissa_bits=2,
    bias=3,
    max=28.0,
    has_nan=False,
    storage=torch.uint8,
)
FP4_E2M1 = FloatFormat(
    name="float4_e2m1fn",
    exponent_bits=2,
    mantissa_bits=1,
    bias=1,
    max=6.0,
    has_nan=False,
    storage=torch.uint8,
)
FLOAT_FORMATS = MappingProxyType(
    {row.name: row for row in (FP8_E4M3, FP8_E5M2, FP6_E2M3, FP6_E3M2, FP4_E2M1)}
)

NF4 = CodeBook(
    name="nf4",
    bits=4,
    # Dettmers et al., "QLoRA" (arXiv:2305.14314), appendix E.
    values=(
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
BINARY = CodeBook(name="binary", bits=1, values=(-1.0, 1.0))


def float_format(name: str) -> FloatFormat:
    """The small float of a name.

    Raises:
        UnsupportedError: there is none.

    >>> float_format("float4_e2m1fn").max
    6.0
    """
    found = FLOAT_FORMATS.get(name)
    if found is None:
        raise UnsupportedError(f'there is no float format "{name}"', fix=near(name, FLOAT_FORMATS))
    return found

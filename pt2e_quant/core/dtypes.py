"""The integer dtypes a tensor can be quantized to: their widths, limits and storage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pt2e_quant.core.errors import UnsupportedError


@dataclass(frozen=True, slots=True, kw_only=True)
class DTypeInfo:
    """One integer dtype.

    Attributes:
        dtype: the torch dtype that names it (torch.int4 is a name: torch cannot compute in it).
        bits: width of one value.
        signed: two's complement if true.
        quant_min: least representable integer.
        quant_max: greatest representable integer.
        storage: the dtype of a tensor that holds one value per element, not packed.
    """

    dtype: torch.dtype
    bits: int
    signed: bool
    quant_min: int
    quant_max: int
    storage: torch.dtype

    @property
    def is_sub_byte(self) -> bool:
        """True if several values fit in a byte, so that storage can be packed."""
        return self.bits < 8

    def holds(self, quant_min: int, quant_max: int) -> bool:
        """True if every integer from quant_min to quant_max is representable."""
        return self.quant_min <= quant_min <= quant_max <= self.quant_max


def _limits(bits: int, signed: bool, storage: torch.dtype) -> DTypeInfo:
    # By name: torch's type stubs do not list the dtypes below one byte.
    dtype: torch.dtype = getattr(torch, f"{'int' if signed else 'uint'}{bits}")
    least = -(1 << (bits - 1)) if signed else 0
    return DTypeInfo(
        dtype=dtype,
        bits=bits,
        signed=signed,
        quant_min=least,
        quant_max=least + (1 << bits) - 1,
        storage=storage,
    )


_INTEGERS = (
    *(_limits(bits, True, torch.int8) for bits in range(1, 9)),
    _limits(16, True, torch.int16),
    _limits(32, True, torch.int32),
    *(_limits(bits, False, torch.uint8) for bits in range(1, 9)),
    _limits(16, False, torch.uint16),
)

# Compilers do not follow a MappingProxyType while a graph changes any dict, a module's buffers say.
DTYPES: Mapping[torch.dtype, DTypeInfo] = {limits.dtype: limits for limits in _INTEGERS}

FLOAT8: Mapping[torch.dtype, DTypeInfo] = {
    dtype: DTypeInfo(
        dtype=dtype,
        bits=8,
        signed=True,
        quant_min=int(torch.finfo(dtype).min),
        quant_max=int(torch.finfo(dtype).max),
        storage=dtype,
    )
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
}
"""Small floats that torch's per-tensor q/dq store whole numbers in, as torchao's specs may ask.

No scheme of this package asks for them: its own float8 rounds to the type's own grid.
"""

# The dtypes of torch's quantized tensors, which torch.ao's observers still take as names.
_PLAIN = {
    torch.qint8: "int8",
    torch.quint8: "uint8",
    torch.qint32: "int32",
    torch.quint4x2: "uint4",
    torch.quint2x4: "uint2",
}


def info(dtype: torch.dtype) -> DTypeInfo:
    """The facts about an integer dtype; torch.qint8 and kin are read as the plain dtype.

    Raises:
        UnsupportedError: if nothing can be quantized to it.

    >>> info(torch.int4).quant_min, info(torch.quint8).dtype
    (-8, torch.uint8)
    """
    limits = DTYPES.get(getattr(torch, _PLAIN[dtype]) if dtype in _PLAIN else dtype)
    if limits is None:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise UnsupportedError(
            f"{dtype} is no integer dtype to quantize to", fix=f"use one of {known}"
        )
    return limits


def limits_of(dtype: torch.dtype) -> DTypeInfo:
    """The facts about a dtype that a q/dq pair can store in: `info`, and float8.

    Raises:
        UnsupportedError: if nothing can be quantized to it.
    """
    return FLOAT8.get(dtype) or info(dtype)


def used_limits(of: Any) -> tuple[int, int]:
    """The least and greatest integer that an observer uses: its dtype's where it names none.

    Args:
        of: has dtype, quant_min and quant_max, as torch's observers do.
    """
    limits = limits_of(of.dtype)
    low = limits.quant_min if of.quant_min is None else int(of.quant_min)
    high = limits.quant_max if of.quant_max is None else int(of.quant_max)
    return low, high

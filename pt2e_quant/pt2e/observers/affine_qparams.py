"""Qparams for blocks of any shape, as torchao's affine primitives choose and apply them."""

from enum import Enum, auto

import torch
from torch import Tensor

from pt2e_quant.core.dtypes import info
from pt2e_quant.core.errors import ConfigError

__all__ = [
    "MappingType",
    "TorchAODType",
    "ZeroPointDomain",
    "block_view",
    "choose_affine_qparams",
    "fake_quantize_affine",
    "integer_range",
]


class _EqualByName(Enum):
    """An enum whose members equal those of torchao's enum of the same name."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Enum):
            return NotImplemented
        return (type(other).__name__, other.name) == (type(self).__name__, self.name)

    def __hash__(self) -> int:
        return hash(self.name)


class MappingType(_EqualByName):
    """How a range of real values is laid over the integers."""

    SYMMETRIC = auto()
    SYMMETRIC_NO_CLIPPING_ERR = auto()
    """Symmetric, the scale the greater of low / quant_min and high / quant_max."""

    ASYMMETRIC = auto()


class ZeroPointDomain(_EqualByName):
    """What a zero_point is: an integer, a real value (of the middle integer), or none."""

    INT = auto()
    FLOAT = auto()
    NONE = auto()


class TorchAODType(Enum):
    """Names of sub-byte dtypes from before torch had them; use torch.int1 .. torch.int7."""

    INT1 = auto()
    INT2 = auto()
    INT3 = auto()
    INT4 = auto()
    INT5 = auto()
    INT6 = auto()
    INT7 = auto()


def integer_range(
    dtype: torch.dtype, quant_min: int | None, quant_max: int | None
) -> tuple[int, int]:
    """The range given, or the dtype's own where it is None.

    Raises:
        ConfigError: it does not fit in the dtype.
    """
    limits = info(dtype)
    low = limits.quant_min if quant_min is None else quant_min
    high = limits.quant_max if quant_max is None else quant_max
    if not limits.holds(low, high):
        raise ConfigError(f"quant_min {low} .. quant_max {high} is no range within {dtype}")
    return low, high


def block_view(x: Tensor, block_size: tuple[int, ...]) -> tuple[Tensor, list[int], list[int]]:
    """A view in which the axes within a block are apart from the axes over blocks.

    Returns:
        The view, the axes within blocks, and its shape with those axes reduced to 1.
    """
    shape: list[int] = []
    within: list[int] = []
    for size, block in zip(x.shape, block_size, strict=True):
        if block not in (1, size):
            shape += [size // block, block]
            within.append(len(shape) - 1)
        else:
            shape.append(size)
            if block != 1:
                within.append(len(shape) - 1)
    reduced = [1 if i in within else size for i, size in enumerate(shape)]
    return x.reshape(shape), within, reduced


def choose_affine_qparams(
    min_val: Tensor,
    max_val: Tensor,
    mapping: str,
    *,
    quant_min: int,
    quant_max: int,
    eps: float | None,
    preserve_zero: bool,
    domain: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Scale and zero_point of ranges of any shape, in the dtype of min_val.

    Args:
        min_val: least value of each block.
        max_val: greatest value of each block.
        mapping: name of a MappingType.
        quant_min: least integer used.
        quant_max: greatest integer used.
        eps: the least scale; the dtype's own if None.
        preserve_zero: 0.0 is mapped to an integer exactly.
        domain: name of a ZeroPointDomain; None is taken for INT.

    Raises:
        ConfigError: the options contradict each other.
    """
    least = torch.finfo(min_val.dtype).eps if eps is None else eps
    low = min_val.clamp(max=0.0) if preserve_zero else min_val
    high = max_val.clamp(min=0.0) if preserve_zero else max_val
    if mapping in ("SYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR"):
        if not preserve_zero or domain not in (None, "INT"):
            raise ConfigError("a symmetric mapping preserves zero and has an integer zero_point")
        if mapping == "SYMMETRIC":
            scale = torch.maximum(-low, high) / (float(quant_max - quant_min) / 2)
        else:
            scale = torch.maximum(low / float(quant_min), high / float(quant_max))
        scale = scale.clamp(min=least)
        return scale, torch.full_like(scale, int((quant_max + quant_min + 1) / 2))
    if mapping != "ASYMMETRIC":
        raise ConfigError(f"there is no mapping {mapping}")
    scale = ((high - low) / float(quant_max - quant_min)).clamp(min=least)
    if domain == "NONE":
        return scale, None
    if preserve_zero:
        return scale, (quant_min - torch.round(low / scale)).clamp(quant_min, quant_max)
    if domain != "FLOAT":
        raise ConfigError("without preserve_zero the zero_point must be in the FLOAT domain")
    return scale, low + scale * ((quant_max + quant_min + 1) / 2)


class _Round(torch.autograd.Function):
    """torch.round with the gradient of the identity."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.round(x)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad


def _round(x: Tensor) -> Tensor:
    rounded: Tensor = _Round.apply(x)  # type: ignore[no-untyped-call]  # torch has no types for it
    return rounded


def fake_quantize_affine(
    x: Tensor,
    block_size: tuple[int, ...],
    scale: Tensor,
    zero_point: Tensor | None,
    *,
    quant_min: int,
    quant_max: int,
    domain: str,
) -> Tensor:
    """Quantize and dequantize block by block, in the dtype of x, with a straight-through gradient.

    Args:
        x: real values.
        block_size: shape of the blocks that share qparams.
        scale: one for each block, in any shape.
        zero_point: likewise; None in the domain NONE.
        quant_min: least integer used.
        quant_max: greatest integer used.
        domain: name of a ZeroPointDomain.
    """
    blocks, _, shape = block_view(x, block_size)
    scale = scale.view(shape)
    offset = None if zero_point is None else zero_point.view(shape)
    if domain == "FLOAT":
        assert offset is not None
        middle = (quant_max + quant_min + 1) / 2
        q = _round((blocks - (offset - scale * middle)) / scale).clamp(quant_min, quant_max)
        return ((q - middle).to(x.dtype) * scale + offset).view(x.shape).to(x.dtype)
    q = _round(blocks * (1.0 / scale))
    if offset is not None:
        q = q + offset
    q = q.clamp(quant_min, quant_max).to(x.dtype)
    if offset is not None:
        q = q - offset.to(x.dtype)
    return (q * scale).view(x.shape).to(x.dtype)

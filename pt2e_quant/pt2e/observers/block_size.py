"""The block of elements that share qparams, for granularities of this package and of torchao."""

from typing import Any

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.granularity import (
    Granularity,
    PerBlock,
    PerChannel,
    PerGroup,
    PerRow,
    PerTensor,
    PerToken,
    block_size_of,
)

__all__ = ["as_granularity", "get_block_size"]


def as_granularity(granularity: Any) -> Granularity:
    """This package's granularity for one of torchao's of the same meaning, read by its name.

    Raises:
        ConfigError: there is none of that name.
    """
    if isinstance(granularity, Granularity):
        return granularity  # also for compilers, which do not follow its constructors
    match type(granularity).__name__:
        case "PerTensor":
            return PerTensor()
        case "PerAxis" | "PerChannel":
            return PerChannel(granularity.axis)
        case "PerGroup":
            return PerGroup(granularity.group_size, getattr(granularity, "axis", -1))
        case "PerRow":
            return PerRow(granularity.dim)
        case "PerToken":
            return PerToken()
        case "PerBlock":
            return PerBlock(tuple(granularity.block_size))
    raise ConfigError(
        f"{granularity!r} is no granularity",
        fix="use PerTensor, PerAxis, PerGroup, PerRow, PerToken or PerBlock",
    )


def get_block_size(input_shape: tuple[int, ...], granularity: Any) -> tuple[int, ...]:
    """The shape of a block in a tensor of the given shape.

    A PerBlock of fewer axes than the tensor has blocks of 1 along the leading axes.

    Raises:
        ConfigError: a block does not divide the shape, or it is no granularity.

    >>> get_block_size((2, 8, 128), PerBlock((4, 32)))
    (1, 4, 32)
    """
    wanted = as_granularity(granularity)
    if isinstance(wanted, PerBlock):
        missing = len(input_shape) - len(wanted.block_size)
        wanted = PerBlock((1,) * missing + wanted.block_size)
    return block_size_of(wanted, input_shape)

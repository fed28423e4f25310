"""A normalization of rows, as one value: the arguments that both operators have."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from pt2e_quant.core.errors import ConfigError

LONGEST = 16384
"""Elements of a row: a program holds whole rows in registers."""

NORM_SCHEMA = (
    "Tensor? weight=None, Tensor? bias=None, float eps=1e-05, bool rounds_first=False, "
    "ScalarType value_dtype=float"
)
"""The fields but for the kind, in a `torch.library` schema."""

_VALUES = (torch.float32, torch.float16, torch.bfloat16)


class NormKind(StrEnum):
    """What rows are divided by."""

    LAYER = "layer"
    """The deviation from their mean, which is taken off."""
    RMS = "rms"
    """The root of their mean square."""


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """y = centred / sqrt(mean(centred ** 2) + eps) * weight + bias, in float32.

    Args:
        kind: whether the mean is taken off first.
        weight: [K], of a float dtype; None for ones.
        bias: [K], of a float dtype; None for zeros.
        eps: what keeps the root from 0.
        rounds_first: round to value_dtype before the weight too, as Llama's written-out form does.
        value_dtype: what the result is rounded to before it is quantized: the graph's own dtype.

    Raises:
        ConfigError: an unknown kind, or a value_dtype that is no float dtype.
    """

    kind: str
    weight: Tensor | None = None
    bias: Tensor | None = None
    eps: float = 1e-5
    rounds_first: bool = False
    value_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.kind not in set(NormKind):
            raise ConfigError(f'a norm is {" or ".join(NormKind)}, found "{self.kind}"')
        if self.value_dtype not in _VALUES:
            raise ConfigError(f"a norm's result is rounded to no {self.value_dtype}")

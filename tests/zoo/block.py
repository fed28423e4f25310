"""What a block of the zoo is: a module, its inputs for a size, and which dimensions may vary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

__all__ = ["Block"]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module with inputs.

    Args:
        make: the module, with weights from torch's generator.
        inputs: the positional inputs for a size of the dynamic dimension.
        dynamic: for each input the dimension that has that size, None for none.
        sizes: the example first, then others; all are at most `largest`.
        least_db: how near the q/dq graph must be to the float model.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Any, ...]]
    dynamic: tuple[int | None, ...] = (0,)
    sizes: tuple[int, ...] = (2, 1, 4)
    largest: int = 8
    least_db: float = 12.0

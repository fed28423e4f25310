"""A module around a function, so that it can be exported."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["WrapperModule"]


class WrapperModule(nn.Module):
    """Calls a function.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the function gives."""
        return self.fn(*args, **kwargs)

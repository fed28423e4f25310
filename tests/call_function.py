"""A function as a module, to be exported."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


class Call(nn.Module):
    """Calls a function of one tensor."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)

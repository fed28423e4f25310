"""Names of torchao.quantization.pt2e.export_utils."""

from collections.abc import Callable
from typing import Any

from torch import nn

from pt2e_quant.flow.qat.train_mode import model_is_exported

__all__ = ["WrapperModule", "model_is_exported"]


class WrapperModule(nn.Module):
    """Calls a function, so that it can be exported as a module.

    Args:
        fn: the function.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The result of the function."""
        return self.fn(*args, **kwargs)

"""The inputs that each module within a model is called with."""

import inspect
from typing import Any

from torch import nn

__all__ = ["get_fqn_to_example_inputs"]


def get_fqn_to_example_inputs(
    model: nn.Module, example_inputs: tuple[Any, ...]
) -> dict[str, tuple[Any, ...]]:
    """Run a model once; returns the inputs of each module in it by dotted name ("" is the model).

    Keyword arguments and defaults are given at their positions. A module that is called several
    times has its last inputs.
    """
    found: dict[str, tuple[Any, ...]] = {}
    names = {module: name for name, module in model.named_modules()}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
        bound.apply_defaults()
        found[names[module]] = (*bound.args, *bound.kwargs.values())

    handles = [
        module.register_forward_pre_hook(note, with_kwargs=True)
        for module in names
        if callable(getattr(module, "forward", None))
    ]
    try:
        model(*example_inputs)
    finally:
        for handle in handles:
            handle.remove()
    return found

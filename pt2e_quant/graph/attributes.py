"""Attributes of a graph's module: reading a dotted name, finding a free one, adding a constant."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.utils.parametrize import is_parametrized

__all__ = [
    "create_getattr_from_value",
    "get_new_attr_name_with_prefix",
    "getattr_from_fqn",
    "has_no_children_ignoring_parametrizations",
]


def getattr_from_fqn(obj: Any, fqn: str) -> Any:
    """The object that a dotted name stands for.

    Raises:
        AttributeError: there is none.
    """
    return reduce(getattr, fqn.split("."), obj)


def get_new_attr_name_with_prefix(prefix: str) -> Callable[[nn.Module], str]:
    """A function that gives the first of prefix0, prefix1, … that is free in a module."""
    base = prefix.replace(".", "_")

    def get_new_attr_name(module: nn.Module) -> str:
        number = 0
        while hasattr(module, f"{base}{number}"):
            number += 1
        return f"{base}{number}"

    return get_new_attr_name


def create_getattr_from_value(
    module: nn.Module,
    graph: Graph,
    prefix: str,
    value: Any,
    device: torch.device | None = None,
) -> Node:
    """Register a value as a buffer under a free name; returns the node that reads it.

    Args:
        module: owns the buffer.
        graph: gets the node, at its insert point.
        prefix: what the name starts with.
        value: a tensor, which is copied, or what a tensor can be made of.
        device: of a new tensor; that of the module's first parameter if None.
    """
    name = get_new_attr_name_with_prefix(prefix)(module)
    if isinstance(value, Tensor):
        made = value.detach().clone()
    else:
        held = next((t.device for t in (*module.parameters(), *module.buffers())), None)
        made = torch.tensor(value, device=device or held)
    module.register_buffer(name, made)
    return graph.create_node("get_attr", name)


def has_no_children_ignoring_parametrizations(module: nn.Module) -> bool:
    """Whether a module has no modules within, but for those that parametrize its tensors."""
    names = set(module._modules)
    return not names or (is_parametrized(module) and names == {"parametrizations"})

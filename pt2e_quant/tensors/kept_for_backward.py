"""Parts of quantized weights that autograd keeps for the backward pass.

`nn.Module.to` swaps each parameter of a subclass with a converted one, which torch refuses while a
graph refers to it. A weight that does not train is therefore given to functions as an alias.
"""

from types import BuiltinFunctionType, FunctionType, MethodDescriptorType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_PYTHON = ("torch.nn.functional", "torch.functional")
_MAY_BE_ITSELF = frozenset(
    "to type type_as contiguous detach float double half bfloat16 cpu cuda xpu clone"
    " view reshape flatten".split()
)
"""Methods whose result may be the tensor itself or knows it, and copies; they keep no values."""
_NO_TENSOR = frozenset(
    "dim ndimension size numel nelement stride element_size storage_offset get_device data_ptr"
    " untyped_storage".split()
)
"""Methods whose result is no tensor, besides `is_…` and `_is_…`.

An alias would take longer than they do; and a tracer asks them while it takes no real tensor.
"""
_KEEP_NOTHING = _MAY_BE_ITSELF | _NO_TENSOR


def call_with_aliases(function: Any, args: Any, kwargs: Any) -> Any:
    """Call a function of torch; where autograd may keep weights, with aliases of them."""
    if torch.is_grad_enabled() and _keeps_arguments(function):
        args, kwargs = tree_map(_alias, (args, kwargs))
    return function(*args, **kwargs)


def _keeps_arguments(function: Any) -> bool:
    """True if autograd may keep arguments of a function that writes none of them.

    Those are the functions of `torch` and `torch.nn.functional` and most methods. A compiler keeps
    no tensors of its own.
    """
    name = getattr(function, "__name__", "_")
    if torch.compiler.is_compiling() or (name.endswith("_") and name != "__getitem__"):
        return False
    if isinstance(function, FunctionType):
        return function.__module__ in _PYTHON
    is_method = isinstance(function, MethodDescriptorType) or name == "__getitem__"
    asks = name in _KEEP_NOTHING or name.startswith(("is_", "_is_"))
    return isinstance(function, BuiltinFunctionType) or (is_method and not asks)


def _alias(value: Any) -> Any:
    """An alias of a subclass's tensor that does not train; anything else as it is."""
    if isinstance(value, Tensor) and type(value) is not Tensor and not value.requires_grad:
        return value.detach()
    return value

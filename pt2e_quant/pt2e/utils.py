"""Names of torchao.quantization.pt2e.utils: attributes, example inputs, checks of qparams."""

import inspect
import warnings
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn.utils.parametrize import is_parametrized

from pt2e_quant.core.dtypes import info, limits_of
from pt2e_quant.core.errors import Pt2eQuantWarning, RangeError, UnsupportedError
from pt2e_quant.core.qparams import choose_float_qparams, choose_qparams, symmetric_zero_point
from pt2e_quant.observers.qschemes import SYMMETRIC, is_per_channel, is_per_tensor
from pt2e_quant.observers.run_time.placeholder import PlaceholderObserver

__all__ = [
    "calculate_qmin_qmax",
    "check_min_max_valid",
    "create_getattr_from_value",
    "determine_qparams",
    "get_fqn_to_example_inputs",
    "get_new_attr_name_with_prefix",
    "get_qparam_dict",
    "getattr_from_fqn",
    "has_no_children_ignoring_parametrizations",
    "is_per_channel",
    "is_per_tensor",
    "to_underlying_dtype",
    "validate_qmin_qmax",
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
    """True if a module has no modules within, but for those that parametrize its tensors."""
    names = set(module._modules)
    return not names or (is_parametrized(module) and names == {"parametrizations"})


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


def to_underlying_dtype(qdtype: torch.dtype) -> torch.dtype:
    """The dtype of the stored integers: int8 for torch.qint8; float8 stays.

    Raises:
        UnsupportedError: nothing can be quantized to it.
    """
    return limits_of(qdtype).storage


def validate_qmin_qmax(quant_min: int, quant_max: int) -> None:
    """Refuse a range that does not hold 0 or is empty.

    Raises:
        RangeError: with both ends.
    """
    if not quant_min <= 0 <= quant_max or quant_min >= quant_max:
        raise RangeError(
            f"quant_min {quant_min} .. quant_max {quant_max} must be a range that holds 0"
        )


def check_min_max_valid(min_val: Tensor, max_val: Tensor) -> bool:
    """True if a range has seen data; a warning says so if it has not.

    Raises:
        RangeError: a min is above its max.
    """
    unseen = min_val.numel() == 0 or max_val.numel() == 0
    if unseen or bool(((min_val == torch.inf) & (max_val == -torch.inf)).all()):
        warnings.warn(
            "no data was seen: the scale is 1.0 and the zero_point 0",
            Pt2eQuantWarning,
            stacklevel=2,
        )
        return False
    if not bool((min_val <= max_val).all()):
        raise RangeError(f"min {min_val} is not below max {max_val}")
    return True


def calculate_qmin_qmax(
    quant_min: int,
    quant_max: int,
    has_customized_qrange: bool,
    dtype: torch.dtype,
    reduce_range: bool,
) -> tuple[int, int]:
    """The integers in use: the range given, else the dtype's own, with one bit less if asked.

    Raises:
        RangeError: the range given does not fit in as many integers as the dtype has.
    """
    limits = info(dtype)
    low, high = quant_min, quant_max
    if not has_customized_qrange:
        low, high = limits.quant_min, limits.quant_max
    elif not 0 < high - low + 1 <= 1 << limits.bits:
        raise RangeError(f"quant_min {low} .. quant_max {high} does not fit in {dtype}")
    is_halved = reduce_range and (has_customized_qrange or limits.bits == 8)
    return (low // 2, high // 2) if is_halved else (low, high)


def determine_qparams(
    min_val: Tensor,
    max_val: Tensor,
    quant_min: int,
    quant_max: int,
    dtype: torch.dtype,
    eps: Tensor,
    has_customized_qrange: bool,
    qscheme: torch.qscheme = torch.per_tensor_affine,
) -> tuple[Tensor, Tensor]:
    """Scale (float64) and zero_point (int64) of a range, as an observer would choose them.

    Raises:
        RangeError: a min is above its max.
    """
    if not check_min_max_valid(min_val, max_val):
        return torch.ones(1, device=min_val.device), torch.zeros(
            1, dtype=torch.int64, device=min_val.device
        )
    limits = {"quant_min": quant_min, "quant_max": quant_max}
    if qscheme == torch.per_channel_affine_float_qparams:
        scale, zero_point = choose_float_qparams(min_val, max_val, eps=eps, **limits)
    else:
        middle = symmetric_zero_point(
            dtype, quant_min, quant_max, has_own_range=has_customized_qrange
        )
        scale, zero_point = choose_qparams(
            min_val,
            max_val,
            symmetric=qscheme in SYMMETRIC,
            eps=eps,
            zero_point_if_symmetric=middle,
            **limits,
        )
    return scale.to(torch.double), zero_point.to(torch.int64)


def get_qparam_dict(observer_or_fake_quant: Any) -> dict[str, Any]:
    """An observer's qparams by name; symmetric schemes are given as the affine ones.

    Raises:
        UnsupportedError: it has a qscheme that is neither per tensor nor per channel.
    """
    observer = observer_or_fake_quant
    qscheme = getattr(observer, "qscheme", None)
    if not qscheme or isinstance(observer, PlaceholderObserver):
        return {"qscheme": None, "dtype": observer.dtype}
    found: dict[str, Any] = {"qscheme": qscheme, "dtype": observer.dtype}
    if is_per_tensor(qscheme):
        found["qscheme"] = torch.per_tensor_affine
    elif is_per_channel(qscheme):
        found["axis"] = observer.ch_axis
        if qscheme == torch.per_channel_symmetric:
            found["qscheme"] = torch.per_channel_affine
    else:
        raise UnsupportedError(f"{qscheme} is neither per tensor nor per channel")
    found["scale"], found["zero_point"] = observer.calculate_qparams()
    for name in ("quant_min", "quant_max"):
        if hasattr(observer, name):
            found[name] = getattr(observer, name)
    return found

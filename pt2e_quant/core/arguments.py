"""Checks of what callers hand to public functions, before anything works with it.

Each error names the argument, what it must be and what was found.
"""

import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn

from pt2e_quant.core.errors import ConfigError

REAL_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Dtypes of tensors that can be quantized."""


def found_text(value: object) -> str:
    """Describe an argument that is not what it must be.

    >>> found_text(None), found_text(3), found_text(nn.Linear)
    ('None', '3', 'the class Linear')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, (str, int, float, torch.dtype)):
        return repr(value)
    return f"a value of type {type(value).__name__}"


def check_type(
    name: str, value: object, kinds: type | tuple[type, ...], what: str, *, fix: str | None = None
) -> None:
    """Check the type of an argument.

    Args:
        name: of the argument.
        value: it.
        kinds: the types it may have.
        what: these in words, "a string".
        fix: what to give instead.

    Raises:
        ConfigError: it has another type.
    """
    if not isinstance(value, kinds):
        raise ConfigError(f"{name} is {what}, found {found_text(value)}", fix=fix)


def check_module(name: str, value: object) -> None:
    """Check that an argument is a module, and not its class.

    Raises:
        ConfigError: it is something else.
    """
    is_class = isinstance(value, type) and issubclass(value, nn.Module)
    made = f"make one: {value.__name__}(…)" if is_class and isinstance(value, type) else None
    check_type(name, value, nn.Module, "a torch.nn.Module", fix=made or "give the model itself")


def check_initialized(module: nn.Module) -> None:
    """Check that every parameter of a module has its values, those of lazy modules too.

    Raises:
        ConfigError: one waits for the first call.
    """
    for name, parameter in module.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ConfigError(
                f'"{name}" has no shape yet: its lazy module waits for its first call',
                fix="call the model once with an example, model(x), before",
            )


def check_filter(value: object) -> None:
    """Check that `filter` is None or a function of a module and its path.

    Raises:
        ConfigError: it is something else.
    """
    if value is None:
        return
    fix = "filter=lambda module, path: isinstance(module, torch.nn.Linear)"
    if not callable(value) or isinstance(value, type):
        text = f"filter is a function of a module and its path, found {found_text(value)}"
        raise ConfigError(text, fix=fix)
    if not takes_call(value, 2):
        raise ConfigError("filter takes two arguments, a module and its path", fix=fix)


def takes_call(function: Callable[..., Any], count: int) -> bool:
    """True if a function can be called with so many positional arguments, as far as it tells."""
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # one written in C that has no signature
        return True
    return True


def check_tensor(name: str, value: object, *, is_real: bool = True) -> None:
    """Check that an argument is a tensor, and of real numbers in 16 bits or more if it must be.

    Raises:
        ConfigError: it is something else.
    """
    check_type(name, value, Tensor, "a tensor", fix="torch.as_tensor(…)")
    assert isinstance(value, Tensor)
    if is_real and value.dtype not in REAL_DTYPES:
        raise ConfigError(
            f"{name} is a tensor of real numbers in 16 bits or more, found {value.dtype}",
            fix=f"convert {name} to torch.float32 first",
        )


def check_dtype(name: str, value: object) -> None:
    """Check that an argument is a dtype of real numbers of 16 bits or more.

    Raises:
        ConfigError: it is something else.
    """
    if not isinstance(value, torch.dtype) or value not in REAL_DTYPES:
        raise ConfigError(
            f"{name} is a float dtype of 16 bits or more, found {found_text(value)}",
            fix=f"{name}=torch.float32, torch.bfloat16 or torch.float16",
        )


def check_number(name: str, value: object, *, least: float, is_whole: bool = False) -> None:
    """Check that an argument is a finite number that is not too small; a tensor of one will do.

    Raises:
        ConfigError: it is something else.
    """
    what = f"{'a whole number' if is_whole else 'a number'} of at least {least:g}"
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    kind = Integral if is_whole else Real
    if not isinstance(number, kind) or isinstance(number, bool):
        raise ConfigError(f"{name} is {what}, found {found_text(number)}")
    if not math.isfinite(float(number)) or float(number) < least:
        raise ConfigError(f"{name} is {what}, found {number}")


def check_flags(value: object, *names: str) -> None:
    """Check that fields of a config are True or False.

    Raises:
        ConfigError: one is something else.
    """
    for name in names:
        check_type(name, getattr(value, name), bool, "True or False")

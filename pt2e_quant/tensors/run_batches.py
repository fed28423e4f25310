"""Run batches through a module, and see what its parts are given."""

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pt2e_quant.core.errors import CalibrationError, InputError, Pt2eQuantError
from pt2e_quant.flow.calibrate.calibrate import check_batches
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, as_call, pick_inputs
from pt2e_quant.tensors.function_ranges import FunctionRanges


def watch_input(module: nn.Module, path: str, see: Callable[[Tensor], Any]) -> RemovableHandle:
    """Show a function the first input of each call of a module, by position or by name.

    Args:
        module: what is called.
        path: its name, for errors.
        see: takes the input, detached.
    """

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = args[0] if args else next(iter(kwargs.values()), None)
        if not isinstance(first, Tensor):
            raise InputError(
                f'"{path}" is given no tensor first, but {type(first).__name__}',
                fix="give batches of tensors",
            )
        try:
            see(first.detach())
        except Pt2eQuantError as error:
            raise type(error)(f'the input of "{path}": {error.what}', fix=error.fix) from error

    return module.register_forward_pre_hook(hook, with_kwargs=True)


def check_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check that a module's forward has the parameters for a call.

    Raises:
        InputError: it has not: labels may be among the inputs.
    """
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(module).__name__}.forward does not take the batch: {error}",
            fix="leave labels out, by inputs=0 or as in ((x,) for x, label in loader)",
        ) from error


def run_call(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], what: str) -> None:
    """Run a module without gradients.

    Args:
        module: it.
        args: of the call.
        kwargs: likewise.
        what: the inputs in words, for the error.

    Raises:
        InputError: the module fails on them.
    """
    check_call(module, args, kwargs)
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except Pt2eQuantError as error:
        raise type(error)(f"{what}: {error.what}", fix=error.fix) from error
    except Exception as error:  # whatever the model raises
        told = str(error).partition("\n")[0]
        path = _path_that_fails(module, args, kwargs)
        where = f' in "{path}"' if path else ""
        raise InputError(
            f"{type(module).__name__} fails on {what}{where}: {type(error).__name__}: {told}",
            fix="give what its forward takes: shapes, dtypes and devices count",
        ) from error


def _path_that_fails(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The path of the innermost module whose call does not return; "" if it is the whole's own."""
    running: list[str] = []
    hooks: list[RemovableHandle] = []

    def leave(*_: Any) -> None:  # a hook that returns something replaces the result
        running.pop()

    for path, part in module.named_modules():
        hooks.append(part.register_forward_pre_hook(lambda *_, path=path: running.append(path)))
        hooks.append(part.register_forward_hook(leave))
    try:
        with torch.no_grad():
            module(*args, **kwargs)
    except Exception:  # known already
        return running[-1] if running else ""
    finally:
        for hook in hooks:
            hook.remove()
    return ""


def run_batches(
    module: nn.Module,
    batches: Iterable[Any],
    inputs: InputPick | None = None,
    ranges: FunctionRanges | None = None,
) -> None:
    """Run batches through a module, for what its hooks see, and note functions' ranges.

    Raises:
        InputError: a batch does not run.
        CalibrationError: there is no batch.
    """
    check_batches(batches)
    count = 0
    for count, batch in enumerate(batches, start=1):
        args, kwargs = as_call(pick_inputs(batch, inputs))
        watch = contextlib.nullcontext() if ranges is None else ranges.watching()
        with watch:
            run_call(module, args, kwargs, f"calibration batch {count - 1}")
    if not count:
        raise CalibrationError("the calibration data is empty", fix="give at least one batch")
    if ranges is not None:
        ranges.choose()

"""The dispatch table of kernels for operations on quantized tensors; users can add to it."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from pt2e_quant.core.arguments import check_type, found_text
from pt2e_quant.core.errors import ConfigError, UnsupportedError, near
from pt2e_quant.kernels.profiler_range import profiler_range
from pt2e_quant.tensors.form import TensorForm
from pt2e_quant.tensors.kernels.cpu_kernels import CPU_KERNELS
from pt2e_quant.tensors.kernels.gpu_kernels import GPU_KERNELS
from pt2e_quant.tensors.kernels.kernel import TensorKernel, takes_all
from pt2e_quant.tensors.layouts.table import layout_named
from pt2e_quant.tensors.quantized_tensor import KERNEL_NAMES

Kind = TypeVar("Kind")

KERNELS: list[TensorKernel] = [*CPU_KERNELS, *GPU_KERNELS]
"""The table. A later row is asked before an earlier one, so that a user's own comes first."""

OPS = ("linear", "embedding")
"""Operations whose kernels are looked up in it."""

REFERENCE = "reference"
"""The name of the operation on real values in profiler ranges and reports."""


def register_kernel(
    run: Callable[..., Tensor],
    *,
    name: str,
    op: str = "linear",
    layout: str = "plain",
    formats: Iterable[str] | None = None,
    granularities: Iterable[type[Any]] | None = None,
    has_input: bool = False,
    device: str = "cpu",
    dtypes: Iterable[torch.dtype] = (torch.float32,),
    takes: Callable[[TensorForm], bool] = takes_all,
) -> TensorKernel:
    """Add a kernel of one's own, a fused quantize - operation - dequantize for example.

    Args:
        run: of (x, weight, bias) for a linear, (weight, places) for an embedding. The weight is
            the `QuantizedTensor`; `weight.parts` is what its layout holds.
        name: what profiles call it.
        op: "linear" or "embedding".
        layout: of the weight.
        formats: such as "int8" or "float8_e4m3fn"; None for any.
        granularities: classes such as PerGroup; None for any.
        has_input: whether it is for weights whose form quantizes the activations too; x is float
            in either case.
        device: the type of the device.
        dtypes: of the activations.
        takes: what must hold of the weight's form besides.

    Raises:
        ConfigError: another kernel has that name, there is no such layout or operation, or an
            argument is of another kind.
    """
    layout_named(layout)
    _check_kernel(run, name, op, device)
    kernel = TensorKernel(
        name=name,
        op=op,
        run=run,
        layout=layout,
        formats=None if formats is None else frozenset(_all_of("formats", formats, str)),
        granularities=(
            None if granularities is None else _all_of("granularities", granularities, type)
        ),
        has_input=has_input,
        device=device,
        dtypes=_all_of("dtypes", dtypes, torch.dtype),
        takes=takes,
    )
    KERNELS.append(kernel)
    _forget()
    return kernel


def _check_kernel(run: object, name: str, op: str, device: str) -> None:
    if not callable(run) or isinstance(run, type):
        raise ConfigError(
            f"run is a function of (x, weight, bias), or (weight, places), found {found_text(run)}",
            fix='register_kernel(my_linear, name="my_linear")',
        )
    check_type("name", name, str, "a string")
    if op not in OPS:
        raise ConfigError(f'no kernel of "{op}" is ever looked up', fix=near(op, OPS))
    check_type("device", device, str, 'the type of a device, such as "cpu"')
    if any(kernel.name == name for kernel in KERNELS):
        raise ConfigError(f'there is a kernel "{name}" already', fix="give yours its own name")


def _all_of(name: str, values: Iterable[Kind], kind: type) -> tuple[Kind, ...]:
    """Values as a tuple, all of one type; a string is no list of letters."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(
            f"{name} is a list of {kind.__name__}, found {found_text(values)}", fix=f"{name}=[…]"
        )
    found = tuple(values)
    for value in found:
        check_type(f"each of {name}", value, kind, f"of type {kind.__name__}")
    return found


def unregister_kernel(name: str) -> None:
    """Take a kernel out of the table.

    Raises:
        ConfigError: there is none of that name.
    """
    found = [kernel for kernel in KERNELS if kernel.name == name]
    if not found:
        names = [kernel.name for kernel in KERNELS]
        raise ConfigError(f'there is no kernel "{name}"', fix=near(name, names))
    KERNELS.remove(found[0])
    _forget()


def _forget() -> None:
    """Look kernels up anew, in code that is compiled from now on too."""
    find_kernel.cache_clear()
    KERNEL_NAMES[:] = [kernel.name for kernel in KERNELS]


@lru_cache(maxsize=4096)
def find_kernel(op: str, form: TensorForm, device: str, dtype: torch.dtype) -> TensorKernel | None:
    """The kernel of an operation; None where the reference runs."""
    fitting = (k for k in reversed(KERNELS) if k.fits(op, form, device, dtype))
    return next(fitting, None)


_forget()


def dispatch_range(op: str, form: TensorForm, kernel: str) -> AbstractContextManager[object]:
    """The profiler range of a dispatch: `pt2e_quant::<op> <format> <layout> <kernel>`.

    Raises:
        UnsupportedError: `torch.jit.trace` follows it.
    """
    if torch._C._get_tracing_state() is not None:
        # It takes no tensors of subclasses for constants, and ends in an assertion of torch's.
        raise UnsupportedError(
            f"torch.jit.trace cannot hold a weight of {form.scheme}",
            fix="torch.export.export(model, args), or pq.quantize(model, args, recipe=None)",
        )
    return profiler_range(op, f"{form.format_name} {form.layout} {kernel}")

"""Define a fused operator: a schema, and what runs it on each device."""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from pt2e_quant.core.errors import MissingExtraError
from pt2e_quant.kernels.profiler_range import profiler_range

_LIBRARY = torch.library.Library("pt2e_quant", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's own


def define(
    schema: str,
    *,
    reference: Callable[..., Any],
    triton: Callable[..., Any],
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
) -> OpOverload:
    """Define `pt2e_quant::<schema>`.

    On CPU tensors the reference runs, or `cpu` in its place, or the Triton kernel where Triton
    interprets; on CUDA tensors the Triton kernel.

    Args:
        schema: name, arguments and results.
        reference: the definition in plain torch.
        triton: launches the kernel; of `triton_kernel`.
        fake: shapes and dtypes.
        cpu: computes what the reference does, to the last bit, in less time.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        if is_interpreting():
            return triton(*args, **kwargs)
        with profiler_range(name, str(kwargs.get("label", ""))):
            return (cpu or reference)(*args, **kwargs)

    torch.library.impl(_LIBRARY, name, "CPU")(on_cpu)
    torch.library.impl(_LIBRARY, name, "CUDA")(triton)
    torch.library.register_fake(f"pt2e_quant::{name}", lib=_LIBRARY)(fake)
    found: OpOverload = getattr(torch.ops.pt2e_quant, name).default
    return found


def fake_linear(*, weight: int, axis: int) -> Callable[..., Tensor]:
    """Shape and dtype of a linear's result: that of the first argument, with N columns.

    Args:
        weight: place among the arguments of a tensor that N is read from.
        axis: of that tensor, whose size is N.
    """

    def fake(*args: Any, out_dtype: torch.dtype = torch.float32, **named: Any) -> Tensor:
        x: Tensor = args[0]
        return x.new_empty((*x.shape[:-1], args[weight].shape[axis]), dtype=out_dtype)

    return fake


def is_interpreting() -> bool:
    """True if Triton runs kernels in its interpreter: as Triton itself reads its environment."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def triton_kernel(module: str, function: str) -> Callable[..., Any]:
    """A function of a file that imports Triton, which is imported at the first call.

    Args:
        module: `pt2e_quant.kernels.int8_linear.gpu`.
        function: what launches the kernel.
    """

    def launch(*args: Any, **kwargs: Any) -> Any:
        if find_spec("triton") is None:
            raise MissingExtraError("cuda", "triton")
        return getattr(import_module(module), function)(*args, **kwargs)

    return launch

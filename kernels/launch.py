"""Checks before the launch of a Triton kernel, and its name in profiles."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pt2e_quant.core.errors import InputError, UnsupportedError
from pt2e_quant.kernels.profiler_range import profiler_range

ELEMENTS = (torch.int8, torch.uint8, torch.float32, torch.float16, torch.bfloat16)
"""The input dtypes of elementwise kernels: integers with qparams, or floats."""

MINIMUM_CAPABILITY = (8, 0)
"""Triton's int8 products need mma of the second version: Ampere and later."""


FP8_CAPABILITY = 89
"""Triton has 8-bit floats of four exponent bits for Ada and later."""


def check_fp8(op: str, device: torch.device) -> int:
    """Refuse GPUs that know no 8-bit floats.

    Returns:
        The compute capability, 90 for 9.0; 0 where Triton interprets.

    Raises:
        UnsupportedError: the GPU is older than Ada.
    """
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < FP8_CAPABILITY:
        raise UnsupportedError(
            f"{op} needs a GPU of compute capability 8.9 (Ada) or later for 8-bit floats, found "
            f"{torch.cuda.get_device_name(device)}",
            fix="quantize to int8, which GPUs from 8.0 on multiply",
        )
    return 10 * major + minor


def check_operands(op: str, dtypes: dict[str, tuple[Tensor, tuple[torch.dtype, ...]]]) -> None:
    """Refuse tensors that a kernel would read wrongly.

    Args:
        op: the operator's name.
        dtypes: argument name to its tensor and the dtypes it may have.

    Raises:
        InputError: a dtype is wrong, or two tensors lie on different devices.
    """
    for name, (tensor, allowed) in dtypes.items():
        if tensor.dtype not in allowed:
            kinds = " or ".join(str(d) for d in allowed)
            raise InputError(f"{op} takes {name} in {kinds}, found {tensor.dtype}")
    _check_one_device(op, {name: tensor for name, (tensor, _) in dtypes.items()})


def check_product(
    op: str,
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sums: Tensor,
    *,
    scales: tuple[torch.dtype, ...] = (torch.float32,),
    sums: torch.dtype = torch.int32,
) -> None:
    """Refuse operands of a product of int8 values that a kernel would read wrongly.

    Args:
        op: the operator's name.
        x: int8.
        x_scale: float32.
        x_zero_point: int32.
        weight: int8.
        weight_scale: of a dtype in `scales`.
        weight_sums: of dtype `sums`.
        scales: dtypes of the weight's scales.
        sums: the dtype of the sums over each row of the weight.

    Raises:
        InputError: a dtype is wrong, or two tensors lie on different devices.
    """
    check_operands(
        op,
        {
            "x": (x, (torch.int8,)),
            "x_scale": (x_scale, (torch.float32,)),
            "x_zero_point": (x_zero_point, (torch.int32,)),
            "weight": (weight, (torch.int8,)),
            "weight_scale": (weight_scale, scales),
            "the sums of the weight": (weight_sums, (sums,)),
        },
    )


def _check_one_device(op: str, tensors: dict[str, Tensor]) -> None:
    first_name, first = next(iter(tensors.items()), ("", None))
    for name, tensor in tensors.items():
        if first is not None and tensor.device != first.device:
            raise InputError(
                f"{op} takes tensors of one device: {first_name} is on {first.device}, "
                f"{name} on {tensor.device}",
                fix="move the module and its inputs to one device",
            )


def check_shapes(op: str, shapes: dict[str, tuple[Tensor | None, tuple[int, ...]]]) -> None:
    """Refuse tensors that a kernel would read past their end, or not to it.

    Args:
        op: the operator's name.
        shapes: argument name to its tensor, or None where it is left out, and the shape it needs.

    Raises:
        InputError: a shape is another, or two tensors lie on different devices.
    """
    given = {name: tensor for name, (tensor, _) in shapes.items() if tensor is not None}
    for name, tensor in given.items():
        shape = shapes[name][1]
        if tuple(tensor.shape) != shape:
            raise InputError(f"{op} takes {name} of shape {shape}, found {tuple(tensor.shape)}")
    _check_one_device(op, given)


def rows_of(op: str, x: Tensor, depth: int, *per_row: Tensor) -> int:
    """The rows of x[..., depth].

    Args:
        op: the operator's name.
        x: whose last axis is summed over.
        depth: what the weight says of it.
        per_row: tensors of one element, or of one for each row.

    Raises:
        InputError: another depth, a depth of 0, or another count of elements.
    """
    check_shapes(op, {"x": (x, (*x.shape[:-1], depth))})
    if not depth:
        raise InputError(f"{op} takes weights of at least one column, found {tuple(x.shape)} for x")
    rows = x.numel() // depth
    for tensor in per_row:
        if tensor.numel() not in (1, rows):
            raise InputError(f"{op} takes scales of 1 element or {rows}, found {tensor.numel()}")
    return rows


@contextlib.contextmanager
def launching(op: str, label: str, device: torch.device) -> Iterator[None]:
    """Make a tensor's device current, and the launch visible to a profiler.

    Raises:
        UnsupportedError: the GPU is older than the kernels.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(profiler_range(op, label))
        if device.type == "cuda":
            if torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
                raise UnsupportedError(
                    f"{op} needs a GPU of compute capability 8.0 (Ampere) or later, found "
                    f"{torch.cuda.get_device_name(device)}",
                    fix='lower to the "cpu" backend',
                )
            stack.enter_context(torch.cuda.device(device))
        yield

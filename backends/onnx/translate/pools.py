"""ONNX for average pools with a divisor of their own, which AveragePool does not have."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset21

from pt2e_quant.graph.ops import each_axis

op: Any = opset21


def pool_translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    aten = torch.ops.aten
    return {aten.avg_pool2d.default: average_pool(2), aten.avg_pool3d.default: average_pool(3)}


def average_pool(rank: int) -> Callable[..., ir.Value]:
    """The translation of the average pool over so many dimensions."""

    def avg_pool(
        x: ir.Value,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> ir.Value:
        """AveragePool; with a divisor its sums over that, see `_pool`."""
        pool = kernel_size, stride, padding
        return _pool(x, rank, pool, ceil_mode, count_include_pad, divisor_override)

    return avg_pool


def _pool(
    x: ir.Value,
    rank: int,
    pool: tuple[Sequence[int], Sequence[int], Sequence[int]],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> ir.Value:
    """The pool of a tensor with or without a batch dimension.

    With a divisor the sums are made of means of whole windows: zeros stand for what a window of
    `ceil_mode` has outside of the padded tensor, where AveragePool would divide by less.
    """
    kernel, stride, padding = (each_axis(values, rank) for values in pool)
    stride = stride or kernel
    is_alone = x.shape is not None and len(x.shape) == rank + 1
    sizes = list(x.shape)[-rank:] if x.shape is not None else [None] * rank
    y: Any = op.Unsqueeze(x, op.Constant(value_ints=[0])) if is_alone else x
    ends = padding
    if divisor is not None and ceil_mode:
        every = zip(sizes, kernel, stride, padding, strict=True)
        ends = [_end_padding(*each) for each in every]
        y = op.Pad(y, op.Constant(value_ints=[0, 0, *padding, 0, 0, *ends]))
        padding = ends = [0] * rank
    y = op.AveragePool(
        y,
        kernel_shape=kernel,
        strides=stride,
        pads=[*padding, *ends],
        ceil_mode=int(ceil_mode and divisor is None),
        count_include_pad=int(count_include_pad or divisor is not None),
    )
    if divisor is not None:
        factor = np.array(math.prod(kernel) / divisor, np.float32)
        y = op.Mul(y, op.Constant(value=ir.tensor(factor)))
    found: ir.Value = op.Squeeze(y, op.Constant(value_ints=[0])) if is_alone else y
    return found


def _end_padding(size: object, kernel: int, stride: int, padding: int) -> int:
    """How many zeros behind a tensor complete its last window in `ceil_mode`; may be negative.

    Raises:
        NotImplementedError: the size is dynamic.
    """
    if not isinstance(size, int):
        raise NotImplementedError(
            "an average pool with divisor_override and ceil_mode over a dynamic dimension"
        )
    windows = -(-(size + 2 * padding - kernel) // stride) + 1
    if (windows - 1) * stride >= size + padding:
        windows -= 1  # a window starts in the tensor or in front of it
    return (windows - 1) * stride + kernel - size - padding

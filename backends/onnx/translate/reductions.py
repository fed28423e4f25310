"""ONNX for means, and for average pools with a divisor and group norms, which lack a kernel."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript import opset21

from pt2e_quant.backends.onnx.values import typed
from pt2e_quant.graph.ops import each_axis

op: Any = opset21

_IMAGE_DIMS = 4


def reduction_translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    aten = torch.ops.aten
    return {
        aten.avg_pool2d.default: average_pool(2),
        aten.avg_pool3d.default: average_pool(3),
        aten.group_norm.default: group_norm,
        aten.mean.dim: mean,
    }


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
    `ceil_mode` has outside of the padded tensor, where AveragePool would divide by less. A last
    window that would start in the padding behind the tensor is left out by torch and ONNX, not by
    ONNX Runtime (1.31): where there may be one, the tensor ends with the window before.
    """
    kernel, stride, padding = (each_axis(values, rank) for values in pool)
    stride = stride or kernel
    is_alone = x.shape is not None and len(x.shape) == rank + 1
    sizes = list(x.shape)[-rank:] if x.shape is not None else [None] * rank
    y: Any = op.Unsqueeze(x, op.Constant(value_ints=[0])) if is_alone else x
    windows = list(zip(sizes, kernel, stride, padding, strict=True))
    ends, crops = padding, [0] * rank
    if divisor is not None and ceil_mode:
        ends = [_end_padding(*each) for each in windows]
        y = op.Pad(y, op.Constant(value_ints=[0, 0, *padding, 0, 0, *ends]))
        padding = ends = [0] * rank
    elif ceil_mode:
        dropped = [_end_padding(*each) if _may_drop(*each) else each[-1] for each in windows]
        ends, crops = [max(end, 0) for end in dropped], [min(end, 0) for end in dropped]
    if any(crops):
        y = op.Pad(y, op.Constant(value_ints=[0] * (rank + 4) + crops))
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


def _may_drop(size: object, kernel: int, stride: int, padding: int) -> bool:
    """True if `ceil_mode` has a last window that would start in the padding behind the tensor."""
    if stride - 1 < kernel - padding:
        return False
    if not isinstance(size, int):
        return True
    return -(-(size + 2 * padding - kernel) // stride) * stride >= size + padding


def _end_padding(size: object, kernel: int, stride: int, padding: int) -> int:
    """Return the zeros that complete a tensor's last window in `ceil_mode`; may be negative.

    Raises:
        NotImplementedError: the size is dynamic.
    """
    if not isinstance(size, int):
        raise NotImplementedError(
            "an average pool with ceil_mode over a dynamic dimension, with a divisor_override or "
            "with windows that may start behind the tensor"
        )
    windows = -(-(size + 2 * padding - kernel) // stride) + 1
    if (windows - 1) * stride >= size + padding:
        windows -= 1  # a window starts in the tensor or in front of it
    return (windows - 1) * stride + kernel - size - padding


def group_norm(
    x: ir.Value,
    num_groups: int,
    weight: ir.Value | None = None,
    bias: ir.Value | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> ir.Value:
    """A group norm as an instance norm of each group's values in one row.

    ONNX Runtime 1.32 has no CPU kernel for GroupNormalization: it writes the operator out as some
    twenty others. InstanceNormalization has one, for float32.

    Before:  group_norm(x[N, C, …], G, w[C], b[C])
    After:   y = Reshape(InstanceNormalization(Reshape(x, [0, G, -1]), ones[G], zeros[G]), Shape(x))
             Add(Mul(y, w[C, 1, …]), b[C, 1, …])
    """
    rank = len(x.shape) if x.shape is not None else 0
    ones, zeros = (
        op.CastLike(op.Constant(value_floats=[value] * num_groups), x) for value in (1.0, 0.0)
    )
    rows = op.Reshape(x, op.Constant(value_ints=[0, num_groups, -1]))
    if x.dtype is ir.DataType.FLOAT:
        normed = op.InstanceNormalization(rows, ones, zeros, epsilon=eps)
    else:
        normed = op.GroupNormalization(rows, ones, zeros, epsilon=eps, num_groups=num_groups)
    found = op.Reshape(normed, op.Shape(x))
    over = op.Constant(value_ints=[-1, *[1] * (rank - 2)])
    found = found if weight is None else op.Mul(found, op.Reshape(weight, over))
    made: ir.Value = found if bias is None else op.Add(found, op.Reshape(bias, over))
    return made


def mean(
    x: ir.Value, dim: Sequence[int] | None, keepdim: bool = False, dtype: int = -1
) -> ir.Value:
    """GlobalAveragePool where the mean of integers or of images is over all spatial axes.

    Behind integer convolutions, whose channels are last, ONNX Runtime's ReduceMean takes much
    longer; behind float ones both take the same. Other means are a ReduceMean: ONNX
    Runtime knows norms that are written out by it.
    """
    if dtype != -1 and dtype is not None:
        x = op.Cast(x, to=dtype)
    rank = len(x.shape) if x.shape is not None else 0
    axes = sorted(d % rank for d in dim) if dim and rank else []
    producer = x.producer()
    is_dequantized = producer is not None and producer.op_type == "DequantizeLinear"
    is_image = is_dequantized or (rank == _IMAGE_DIMS and x.dtype is ir.DataType.FLOAT)
    if is_image and rank > 2 and axes == list(range(2, rank)):
        pooled = op.GlobalAveragePool(x)
        return typed(pooled if keepdim else op.Squeeze(pooled, op.Constant(value_ints=axes)))
    if axes == [1] and _is_one_matrix(x):
        return _mean_of_rows(x, keepdim=keepdim)
    over = [op.Constant(value_ints=list(dim))] if dim else []
    return typed(op.ReduceMean(x, *over, keepdims=int(keepdim)))


def _is_one_matrix(x: ir.Value) -> bool:
    """True for float32 tokens or an image, of a batch that is always 1."""
    shape = x.shape
    if shape is None or len(shape) not in (_IMAGE_DIMS - 1, _IMAGE_DIMS):
        return False
    return x.dtype is ir.DataType.FLOAT and shape[0] == 1


def _mean_of_rows(x: ir.Value, *, keepdim: bool) -> ir.Value:
    """A row of ones times the rows, by their number.

    ONNX Runtime sums the rows of one matrix element by element, which takes 1.1 to 4.7 times as
    long (`benchmarks/onnx_forms.py`). Of a larger batch it sums as fast.
    """
    assert x.shape is not None
    count = op.Shape(x, start=1, end=2)
    ones = op.Expand(op.Constant(value_floats=[1.0]), op.Concat(_one(), count, axis=0))
    is_image = len(x.shape) == _IMAGE_DIMS
    rows = op.Reshape(x, op.Constant(value_ints=[0, 0, -1])) if is_image else x
    total = op.MatMul(ones, rows)
    mean = op.Div(total, op.Cast(count, to=ir.DataType.FLOAT))
    if is_image:
        sizes = [op.Shape(x, start=0, end=1), *([_one()] if keepdim else []), op.Shape(x, start=2)]
        return typed(op.Reshape(mean, op.Concat(*sizes, axis=0)))
    return typed(mean if keepdim else op.Squeeze(mean, _one()))


def _one() -> Any:
    return op.Constant(value_ints=[1])

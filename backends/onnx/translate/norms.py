"""Translation of group norms to the form that ONNX Runtime has a kernel for."""

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
from onnxscript import opset21

op: Any = opset21


def norm_translations() -> dict[Callable[..., object], Callable[..., object]]:
    """Operator overload to translation, as `custom_translation_table` takes it."""
    return {torch.ops.aten.group_norm.default: group_norm}


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

"""The operator `pt2e_quant::int8_cat`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_cat import reference

__all__ = ["Int8Cat", "cost"]


def _fake(
    xs: Sequence[Tensor],
    dim: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return reference.empty_result(xs, dim, out_dtype)


Int8Cat = define(
    "int8_cat(Tensor[] xs, int dim, float[] scales, int[] zero_points, *, "
    f'{OUTPUT_SCHEMA}, str label="") -> Tensor',
    reference=reference.int8_cat,
    triton=triton_kernel("pt2e_quant.kernels.int8_cat.gpu", "int8_cat"),
    fake=_fake,
)
"""y = q(activation(cat(dq(x) for x in xs))): one launch for every four tensors.

    xs: int8 or uint8 with a scale and a zero point each, or float dtypes (1.0 and 0 then).
    dim: the axis; the other sizes are equal.
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

The result is channels-last if the first tensor is; what lies otherwise is copied first. A tensor
with the result's qparams keeps its integers.
"""


def cost(xs: Sequence[Tensor], out: Tensor) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(*xs, out), operations=10 * out.numel())

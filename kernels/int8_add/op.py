"""The operator `pt2e_quant::int8_add`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_add import reference
from pt2e_quant.kernels.int8_add.broadcast import result_like

__all__ = ["Int8Add", "cost"]


def _fake(x: Tensor, y: Tensor, *, out_dtype: torch.dtype = torch.float32, **named: Any) -> Tensor:
    return torch.empty_like(result_like(x, y), dtype=out_dtype)


Int8Add = define(
    'int8_add(Tensor x, Tensor y, *, str combine="add", float x_scale=1.0, int x_zero_point=0, '
    f"float y_scale=1.0, int y_zero_point=0, {OUTPUT_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_add,
    triton=triton_kernel("pt2e_quant.kernels.int8_add.gpu", "int8_add"),
    fake=_fake,
)
"""y = q(activation(dq(x) combined with dq(y))): in float32 between, and any end may be float.

    x, y: int8 or uint8 with their qparams, or a float dtype; they broadcast against each other.
    combine: "add", "sub" or "mul".
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

The result has the strides of the operand that has its shape, x's if both do.
"""


def cost(x: Tensor, y: Tensor, out: Tensor) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(x, y, out), operations=10 * out.numel())

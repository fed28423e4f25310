"""The operator `pt2e_quant::softmax_quantize`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.softmax_quantize import reference

__all__ = ["SoftmaxQuantize", "cost"]


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, **named: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


SoftmaxQuantize = define(
    "softmax_quantize(Tensor x, Tensor? mask=None, float scale=1.0, ScalarType value_dtype=float, "
    "*, ScalarType out_dtype=int8, float out_scale=0.00390625, int out_zero_point=-128, "
    'int out_min=-128, int out_max=127, str label="") -> Tensor',
    reference=reference.softmax_quantize,
    triton=triton_kernel("pt2e_quant.kernels.softmax_quantize.gpu", "softmax_quantize"),
    fake=_fake,
)
"""q(softmax(x * scale + mask)) along the last axis.

    x: float32, float16 or bfloat16 of 1 to 4 axes; rows of at most 16384, each with a finite score.
    mask: a float dtype, broadcasts to x; None for none.
    scale: what scores are multiplied by.
    value_dtype: what the result is rounded to before it is quantized: the graph's own dtype.
    out_dtype, …, out_max: of `epilogue.Epilogue`.
    label: the node, for the profiler.
"""


def cost(x: Tensor, mask: Tensor | None) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(x, mask) + x.numel(), operations=10 * x.numel())

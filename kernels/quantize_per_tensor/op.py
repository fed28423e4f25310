"""The operators `quantize_per_tensor` and `quantize_per_tensor_e4m3`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.quantize_per_tensor import reference

_GPU = "pt2e_quant.kernels.quantize_per_tensor.gpu"


def _fake(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(x, dtype=torch.int8),
        x.new_empty(1, dtype=torch.float32),
        x.new_empty(1, dtype=torch.int32),
    )


QuantizeTensor = define(
    "quantize_per_tensor(Tensor x, int quant_min=-128, int quant_max=127, "
    'float eps=1.1920928955078125e-07, bool symmetric=False, *, str label="") '
    "-> (Tensor, Tensor, Tensor)",
    reference=reference.quantize_per_tensor,
    triton=triton_kernel(_GPU, "quantize_per_tensor"),
    fake=_fake,
)
"""Integers int8 of x's shape and strides, their scale float32[1] and zero point int32[1].

    x: float32, float16 or bfloat16 of finite numbers, of any shape.
    quant_min, quant_max: the range that qparams are chosen for, and that integers are clamped to.
    eps: the least scale; more than 0.
    symmetric: the zero point is 0.
    label: the node, for the profiler.

Equal to the last bit to quantized_decomposed's choose_qparams.tensor (choose_qparams_symmetric)
and quantize_per_tensor.tensor on the CPU; the scale is the same number in float32.
"""


def _fake_e4m3(x: Tensor, *, label: str = "") -> tuple[Tensor, Tensor]:
    scale = x.new_empty((1,) * x.dim(), dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scale


QuantizeTensorE4m3 = define(
    'quantize_per_tensor_e4m3(Tensor x, *, str label="") -> (Tensor, Tensor)',
    reference=reference.quantize_per_tensor_e4m3,
    triton=triton_kernel(_GPU, "quantize_per_tensor_e4m3"),
    fake=_fake_e4m3,
)
"""Codes float8_e4m3fn of x's shape and strides, and the scale float32[1, …] at which the greatest
is 448.

    x: float32, float16 or bfloat16, of at least one dimension.
    label: the node, for the profiler.

Equal to the last bit to pt2e_quant::choose_scales and pt2e_quant::quantize_float on the CPU.
"""


def cost(x: Tensor) -> Cost:
    """Bytes and operations of one call: x is read twice; two comparisons, a product, a rounding."""
    return Cost(bytes=2 * moved_bytes(x) + x.numel(), operations=5 * x.numel())

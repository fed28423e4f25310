"""The operators `norm_quantize`, `norm_quantize_per_token` and `norm_quantize_per_token_e4m3`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.norm_quantize import reference
from pt2e_quant.kernels.norm_quantize.norm import NORM_SCHEMA

__all__ = ["NormQuantize", "NormQuantizePerToken", "NormQuantizePerTokenE4m3", "cost"]

_GPU = "pt2e_quant.kernels.norm_quantize.gpu"


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, **named: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


def _fake_per_token(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    rows = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.int32),
    )


def _fake_per_token_e4m3(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


NormQuantize = define(
    f"norm_quantize(Tensor x, str kind, {NORM_SCHEMA}, *, ScalarType out_dtype=int8, "
    "float out_scale=1.0, int out_zero_point=0, int out_min=-128, int out_max=127, "
    'str label="") -> Tensor',
    reference=reference.norm_quantize,
    triton=triton_kernel(_GPU, "norm_quantize"),
    fake=_fake,
)
"""int8, uint8 or float8_e4m3fn[..., K] of the normalized rows of x, to static qparams.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    out_dtype, …, out_max: of `epilogue.Epilogue`.
    label: the node, for the profiler.
"""

NormQuantizePerToken = define(
    f"norm_quantize_per_token(Tensor x, str kind, {NORM_SCHEMA}, *, int quant_min=-128, "
    'int quant_max=127, str label="") -> (Tensor, Tensor, Tensor)',
    reference=reference.norm_quantize_per_token,
    triton=triton_kernel(_GPU, "norm_quantize_per_token"),
    fake=_fake_per_token,
)
"""Integers int8[..., K], scales float32[..., 1] and zero points int32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    quant_min, quant_max: what the integers are clamped to; qparams are chosen for -128..127.
    label: the node, for the profiler.
"""

NormQuantizePerTokenE4m3 = define(
    f"norm_quantize_per_token_e4m3(Tensor x, str kind, {NORM_SCHEMA}, *, "
    'str label="") -> (Tensor, Tensor)',
    reference=reference.norm_quantize_per_token_e4m3,
    triton=triton_kernel(_GPU, "norm_quantize_per_token_e4m3"),
    fake=_fake_per_token_e4m3,
)
"""Codes float8_e4m3fn[..., K] and scales float32[..., 1] of normalized rows.

    x: float32, float16 or bfloat16[..., K], K of 1 .. 16384.
    kind, weight, …, value_dtype: of `norm.Norm`.
    label: the node, for the profiler.
"""


def cost(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(
        bytes=moved_bytes(x, weight, bias) + x.numel(),
        operations=10 * x.numel(),
    )

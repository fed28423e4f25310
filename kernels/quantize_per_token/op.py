"""The operator `pt2e_quant::quantize_per_token`."""

from typing import Any

import torch
from torch import Tensor

from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.quantize_per_token import cpu_dynamic, reference


def fake_rows(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes and dtypes of integers, scales and zero points, one pair of these for each row."""
    rows = (*x.shape[:-1], 1)
    return (
        x.new_empty(x.shape, dtype=torch.int8),
        x.new_empty(rows, dtype=torch.float32),
        x.new_empty(rows, dtype=torch.int32),
    )


QuantizeRows = define(
    "quantize_per_token(Tensor x, int quant_min=-128, int quant_max=127, *, "
    'str label="") -> (Tensor, Tensor, Tensor)',
    reference=reference.quantize_per_token,
    triton=triton_kernel("pt2e_quant.kernels.quantize_per_token.gpu", "quantize_per_token"),
    fake=fake_rows,
    cpu=cpu_dynamic.quantize_per_token,
)
"""Integers int8[..., K], scales float32[..., 1] and zero points int32[..., 1] of x's rows.

    x: float32, float16 or bfloat16[..., K] of finite numbers; K >= 1.
    quant_min, quant_max: what the integers are clamped to; qparams are chosen for -128..127.
    label: the node, for the profiler.

Equal to the last bit to quantized_decomposed's choose_qparams_per_token_asymmetric and
quantize_per_token on the CPU; the scales are the same numbers in float32.
"""


def fake_rows_e4m3(x: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of codes and scales, one scale for each row."""
    scale = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), scale


QuantizeRowsE4m3 = define(
    'quantize_per_token_e4m3(Tensor x, *, str label="") -> (Tensor, Tensor)',
    reference=reference.quantize_per_token_e4m3,
    triton=triton_kernel("pt2e_quant.kernels.quantize_per_token.gpu", "quantize_per_token_e4m3"),
    fake=fake_rows_e4m3,
)
"""Codes float8_e4m3fn[..., K] and scales float32[..., 1] of x's rows: the greatest is 448.

    x: float32, float16 or bfloat16[..., K]; K >= 1.
    label: the node, for the profiler.

Equal to the last bit to pt2e_quant::choose_scales and pt2e_quant::quantize_float on the CPU.
"""


def cost(x: Tensor, row_bytes: int = 8) -> Cost:
    """Bytes and operations of one call: two comparisons, a product, a sum and a rounding.

    Args:
        x: what is quantized.
        row_bytes: of the qparams of a row.
    """
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(bytes=moved_bytes(x) + x.numel() + row_bytes * rows, operations=5 * x.numel())

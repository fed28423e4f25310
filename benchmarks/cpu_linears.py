"""Linears in integers against packed float32 on this CPU, by class of sizes."""

from functools import partial
from typing import Any

import torch

from benchmarks.cpu_times import Call, times_of, with_any_rows
from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups
from pt2e_quant.kernels.int4_linear.few_rows_op import UINT4, PackInt4, scales_and_zeros
from pt2e_quant.kernels.int8_linear.cpu import class_of, dynamic_class_of
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs, limb_shifts, weight_limbs
from pt2e_quant.kernels.onednn.limbs_site import class_of as weight_only_class_of
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.quantize_per_token.op import QuantizeRows

__all__ = [
    "dynamic_calls",
    "dynamic_ratios",
    "linear_calls",
    "linear_ratios",
    "weight_only_calls",
    "weight_only_ratios",
]

onednn: Any = torch.ops.onednn
mkldnn: Any = torch.ops.mkldnn
Sizes = tuple[int, int, int]
"""Rows, output features, input features."""
_SCALE, _ZERO_POINT = 0.02, 3
_GROUP = 32

LINEARS: tuple[Sizes, ...] = tuple(
    (rows, n, k)
    for rows in (1, 16, 128, 256)
    for n, k in ((32, 32), (10, 64), (768, 768), (3072, 768))
)
LARGE: tuple[Sizes, ...] = tuple(
    (rows, n, k)
    for rows in (1, 4, 16, 64, 256)
    for n, k in ((384, 384), (768, 768), (1536, 384), (1024, 1024), (3072, 768), (4096, 1024))
)


def linear_calls(rows: int, n: int, k: int) -> dict[str, Call]:
    """The float and the int8 linear, both with float results."""
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    packed = mkldnn._reorder_linear_weight(weight, rows)
    x_q = torch.randint(0, 256, (rows, k), dtype=torch.uint8)
    weight_q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    packed_q = onednn.qlinear_prepack(weight_q, [rows, k])
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int32)
    head = (x_q, _SCALE, _ZERO_POINT, packed_q, scales, zeros, bias)
    end = (1.0, 0, torch.float32, "none", [], "")
    return {
        "float": lambda: mkldnn._linear_pointwise(x, packed, bias, "none", [], ""),
        "int8": lambda: onednn.qlinear_pointwise(*head, *end),
    }


def dynamic_calls(rows: int, n: int, k: int) -> dict[str, Call]:
    """The float linear, and a quantize per token with the int8 one, all of and to float."""
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    plain = mkldnn._reorder_linear_weight(weight, rows)
    weight_q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    packed = PackLinear(weight_q, None)
    scales, sums = torch.full((n,), 0.01), weight_q.sum(1, dtype=torch.int32).float()
    return {
        "float": lambda: mkldnn._linear_pointwise(x, plain, bias, "none", [], ""),
        "int8": lambda: Int8LinearRows(*QuantizeRows(x), packed, scales, sums, bias=bias),
    }


def weight_only_calls(rows: int, n: int, k: int) -> dict[str, Call]:
    """The float linear, one on int8 rows, and one on 4-bit groups, all of and to float."""
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    plain = mkldnn._reorder_linear_weight(weight, rows)
    high, low, scale = weight_limbs(weight)
    zeros, shifts = torch.zeros(n, dtype=torch.int32), limb_shifts(2)
    packed = [PackLinear(limb, None) for limb in (high, low)]
    first = (x, packed[0], scale, zeros, shifts)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = scales_and_zeros(torch.rand(n, k // _GROUP), None)
    few = PackInt4(pack(codes, UINT4))
    last = (n, *first[1:], packed[1], scale, bias)
    return {
        "float": lambda: mkldnn._linear_pointwise(x, plain, bias, "none", [], ""),
        "rows": lambda: LinearOfLimbs(*first, None, None, bias),
        "groups": lambda: LinearOfGroups(x, few, _GROUP, scales, *last),
    }


def linear_ratios(rounds: int, linears: tuple[Sizes, ...] = LINEARS) -> dict[str, float]:
    """Shape class to speed of int8 over float."""
    found: dict[tuple[int, int], list[float]] = {}
    for rows, n, k in linears:
        times = times_of(linear_calls(rows, n, k), rounds)
        found.setdefault((rows, n * k), []).append(times["float"] / times["int8"])
    return with_any_rows(class_of, found)


def dynamic_ratios(rounds: int, linears: tuple[Sizes, ...] = LARGE) -> dict[str, float]:
    """Shape class to speed of a quantize per token and int8 over float."""
    found: dict[tuple[int, int], list[float]] = {}
    for rows, n, k in linears:
        times = times_of(dynamic_calls(rows, n, k), rounds)
        found.setdefault((rows, n * k), []).append(times["float"] / times["int8"])
    return with_any_rows(dynamic_class_of, found)


def weight_only_ratios(
    rounds: int, linears: tuple[Sizes, ...] = LARGE
) -> dict[str, dict[str, float]]:
    """Shape class to speed of integer weights over float, by how the weight is scaled."""
    found: dict[str, dict[tuple[int, int], list[float]]] = {"rows": {}, "groups": {}}
    for rows, n, k in linears:
        times = times_of(weight_only_calls(rows, n, k), rounds)
        for form, ratios in found.items():
            ratios.setdefault((rows, n * k), []).append(times["float"] / times[form])
    return {
        form: with_any_rows(partial(weight_only_class_of, form), ratios)
        for form, ratios in found.items()
    }

"""The order of tiles, their products, and the kernel that adds what splits of K left."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments, write_result
from pt2e_quant.kernels.tiles import tiles_for


@triton.jit
def tile_of_program(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Row and column of a program's tile: in stripes of GROUP_M, so that weights stay in L2."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    stripe = program // (GROUP_M * tiles_n)
    first_m = stripe * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return first_m + within % height, within // height


@triton.jit
def _upper_half(x):
    """Float32 values without their lower 16 bits: each is a bfloat16."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def multiply_floats(weights, x, EMULATE: tl.constexpr):
    """The float32 sums of weights @ x, whose float32 is three bfloat16 parts."""
    if EMULATE:
        return tl.dot(weights, x.to(tl.float32))
    elif x.dtype == tl.float32:
        # 24 bits are three times 8, and each product of a part and a weight is exact.
        first = _upper_half(x)
        second = _upper_half(x - first)
        third = x - first - second
        sums = tl.dot(weights, third.to(tl.bfloat16))
        sums = tl.dot(weights, second.to(tl.bfloat16), sums)
        return tl.dot(weights, first.to(tl.bfloat16), sums)
    else:
        return tl.dot(weights, x)


@triton.jit
def write_tile(
    total, rows, columns, x_scale, bias, residual, out, M, N, residual_scale,
    residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
    HAS_SCALE: tl.constexpr, PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """Finish and store sums float32[BLOCK_N, BLOCK_M], or store them as a part of a split product.

    x_scale is what they are multiplied by, float32[M] or [1].
    """
    in_rows, in_columns = rows < M, columns < N
    place = rows.to(tl.int64)[None, :] * N + columns[:, None]
    inside = in_rows[None, :] & in_columns[:, None]
    if SPLIT_K > 1:
        at = out + tl.program_id(1).to(tl.int64) * M * N
        tl.store(at + place, total, mask=inside)
    else:
        if HAS_SCALE:
            if PER_ROW:
                total *= tl.load(x_scale + rows, mask=in_rows, other=0.0)[None, :]
            else:
                total *= tl.load(x_scale)
        if HAS_BIAS:
            added = tl.load(bias + columns, mask=in_columns, other=0.0)
            total += added.to(tl.float32)[:, None]
        write_result(
            total, place, inside, residual, out, residual_scale, residual_zero_point, act_low,
            act_high, out_scaling, out_zero_point, out_min, out_max,
            RESIDUAL, ACTIVATION, IS_INTEGER,
        )  # fmt: skip


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def add_splits_kernel(
    partial, row_scale, bias, residual, out, SPLITS, size, N, residual_scale,
    residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
    PER_ROW: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements of the result: sums of SPLITS parts in ascending order, then the epilogue.

    partial is float32[SPLITS, M, N], row_scale float32[M] or [1].
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    at = partial + place
    real = tl.load(at, mask=inside, other=0.0)
    for _ in range(1, SPLITS):
        at += size
        real += tl.load(at, mask=inside, other=0.0)
    if HAS_SCALE:
        if PER_ROW:
            real *= tl.load(row_scale + place // N, mask=inside, other=0.0)
        else:
            real *= tl.load(row_scale)
    if HAS_BIAS:
        real += tl.load(bias + place % N, mask=inside, other=0.0).to(tl.float32)
    write_result(
        real, place, inside, residual, out, residual_scale, residual_zero_point, act_low,
        act_high, out_scaling, out_zero_point, out_min, out_max,
        RESIDUAL, ACTIVATION, IS_INTEGER,
    )  # fmt: skip


def adding(
    op: str, partial: Tensor, row_scale: Tensor | None, end: Epilogue, out: Tensor
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and arguments of `add_splits_kernel`, which ends a product that was cut along K.

    Args:
        op: the unit, for its tiles.
        partial: float32[SPLITS, M, N].
        row_scale: what sums are multiplied by, float32[M] or [1]; None for nothing.
        end: what follows.
        out: is written.
    """
    chosen = tiles_for(op, out.device, "add_splits")
    named = {
        "partial": partial,
        "row_scale": None if row_scale is None else row_scale.contiguous(),
        "bias": None if end.bias is None else end.bias.contiguous(),
        "out": out,
        "SPLITS": partial.shape[0],
        "size": out.numel(),
        "N": out.shape[-1],
        "PER_ROW": row_scale is not None and row_scale.numel() > 1,
        "HAS_SCALE": row_scale is not None,
        **launch_arguments(end),
        **chosen.options(),
    }
    return (triton.cdiv(out.numel(), chosen["BLOCK"]),), named

"""a8w4_linear in Triton: out^T = W x^T in int8, weights widened in registers three at a time.

With the weight as the left operand its bytes go from shared memory to registers; four of them are
eight int8 after three instructions (`pack.py`) and go into the matrix units from there.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.a8w4_linear.pack import check_group_size, half_of, run_of
from pt2e_quant.kernels.a8w4_linear.tile_class import tile_class
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments
from pt2e_quant.kernels.fused_op import is_interpreting
from pt2e_quant.kernels.launch import check_product, check_shapes, launching, rows_of
from pt2e_quant.kernels.swapped_gemm.gpu import (
    add_splits_kernel,
    adding,
    tile_of_program,
    write_tile,
)
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, tiles_for

_SCALES = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _halves(packed, EMULATE: tl.constexpr):
    """Both halves of each byte as int8, sixteen times too large."""
    if EMULATE:
        return (packed << 4).to(tl.int8), (packed & -16).to(tl.int8)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 t; shl.b32 t, $2, 4; and.b32 $0, t, 0xF0F0F0F0; "
            "and.b32 $1, $2, 0xF0F0F0F0; }",
            "=r,=r,r",
            [packed],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )


@triton.jit
def _multiply_add(sums, scale, total, EMULATE: tl.constexpr):
    """The total plus sums * scale, rounded once; the interpreter's own rounds twice."""
    if EMULATE:
        # The product has 46 bits at most. An odd last bit stands for all that float64 cuts off the
        # sum (`lost`, Knuth's TwoSum), so that rounding it to float32 is the only rounding.
        product, addend = sums.to(tl.float64) * scale.to(tl.float64), total.to(tl.float64)
        near = product + addend
        back = near - product
        lost = (product - (near - back)) + (addend - back)
        bits = near.to(tl.int64, bitcast=True)
        step = tl.where((lost > 0) == (near > 0), 1, -1)
        bits = tl.where((lost != 0) & ((bits & 1) == 0), bits + step, bits)
        return bits.to(tl.float64, bitcast=True).to(tl.float32)
    else:
        return tl.fma(sums, scale, total)


@triton.jit
def _add_run(sums, scale, total, AS_BITS: tl.constexpr, EMULATE: tl.constexpr):
    """The total plus a run's sums int32[BLOCK_N, BLOCK_M] times its scales [BLOCK_N].

    AS_BITS: sums were added to the bits of 1.5 * 2^23, so that they are that float plus the sum.
    """
    if AS_BITS:
        real = sums.to(tl.float32, bitcast=True) - 12582912.0
    else:
        real = sums.to(tl.float32)
    spread = tl.broadcast_to(scale.to(tl.float32)[:, None], real.shape)
    return _multiply_add(real, spread, total, EMULATE)


@triton.jit
def _take_off_zero_points(
    total, x_zero_point, weight_sum, rows, columns, M, N,
    PER_ROW: tl.constexpr, EMULATE: tl.constexpr,
):  # fmt: skip
    """The total less zero point times weight_sum: in the first part of K, where that is cut."""
    inside = (columns < N) & (tl.program_id(1) == 0)
    whole = tl.load(weight_sum + columns, mask=inside, other=0.0)
    if PER_ROW:
        zeros = tl.load(x_zero_point + rows, mask=rows < M, other=0)
    else:
        zeros = tl.load(x_zero_point) + tl.zeros_like(rows)
    minus = tl.broadcast_to(-zeros.to(tl.float32)[None, :], total.shape)
    return _multiply_add(minus, tl.broadcast_to(whole[:, None], total.shape), total, EMULATE)


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def a8w4_linear_kernel(
    x, x_scale, x_zero_point, weight, weight_scale, weight_sum, bias, residual, out, M, N, K,
    group_runs, scale_stride, residual_scale, residual_zero_point, act_low, act_high,
    out_scaling, out_zero_point, out_min, out_max,
    HALF: tl.constexpr, TWO_RUNS: tl.constexpr, LONG_GROUPS: tl.constexpr, AS_BITS: tl.constexpr,
    PER_ROW: tl.constexpr, EVEN_K: tl.constexpr, EMULATE: tl.constexpr, HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result, or of its sum over a part of K where SPLIT_K > 1.

    A packed block of 2 HALF k's is two runs or one (TWO_RUNS); a turn of the loop takes BLOCK_K
    k's. A group is one run, or group_runs of them (LONG_GROUPS), or all (scale_stride 0).
    """
    PARTS: tl.constexpr = BLOCK_K // (2 * HALF)
    RUN: tl.constexpr = HALF if TWO_RUNS else 2 * HALF
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Beyond the ragged edges the last row and column are read again: loads need no masks there.
    within, safe_columns = tl.minimum(rows, M - 1) - tile_m * BLOCK_M, tl.minimum(columns, N - 1)
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K)
    first = tl.program_id(1) * each
    depth = tl.arange(0, HALF)
    # Rows times K passes 2**31 for long batches.
    x_at = x + (tile_m.to(tl.int64) * BLOCK_M * K + first * BLOCK_K)
    x_places = within[None, :] * K + depth[:, None]
    weight_at = weight + first.to(tl.int64) * N * (BLOCK_K // 2)
    weight_places = safe_columns[:, None] * HALF + depth[None, :]
    scale_at = weight_scale + safe_columns
    start = tl.full((BLOCK_N, BLOCK_M), 0x4B400000 if AS_BITS else 0, tl.int32)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for turn in range(first, tl.minimum(first + each, tl.cdiv(K, BLOCK_K))):
        for part in tl.static_range(PARTS):
            k = turn * BLOCK_K + part * 2 * HALF
            packed_at = weight_at + part * N * HALF + weight_places
            packed = tl.load(packed_at) if EVEN_K else tl.load(packed_at, mask=k < K, other=0)
            sums, halves = start, _halves(packed, EMULATE)
            for half in tl.static_range(2):
                x_place = x_at + (part * 2 + half) * HALF + x_places
                if EVEN_K:
                    some_x = tl.load(x_place)
                else:
                    left = K - k - half * HALF
                    some_x = tl.load(x_place, mask=(depth < left)[:, None], other=0)
                sums = tl.dot(halves[half], some_x, sums, out_dtype=tl.int32)
                if TWO_RUNS or half == 1:
                    run = (k + half * HALF) // RUN
                    group = run // group_runs if LONG_GROUPS else run
                    place = scale_at + group * scale_stride
                    if EVEN_K:
                        scale = tl.load(place)
                    else:
                        scale = tl.load(place, mask=run * RUN < K, other=0.0)
                    total = _add_run(sums, scale, total, AS_BITS, EMULATE)
                    sums = start
        x_at += BLOCK_K
        weight_at += N * (BLOCK_K // 2)

    # `_halves` are sixteen times the weights.
    total = _take_off_zero_points(
        total * 0.0625, x_zero_point, weight_sum, rows, columns, M, N, PER_ROW, EMULATE
    )
    write_tile(
        total, rows, columns, x_scale, bias, residual, out, M, N,
        residual_scale, residual_zero_point, act_low, act_high,
        out_scaling, out_zero_point, out_min, out_max,
        True, PER_ROW, HAS_BIAS, RESIDUAL, ACTIVATION, IS_INTEGER, SPLIT_K,
    )  # fmt: skip


def sums_as_bits(device: torch.device) -> bool:
    """True if int32 sums become floats by their bits: an addition, where converting is slow.

    wgmma adds to its own registers: on Hopper filling them costs as much as the addition saves.
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9


def a8w4_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    group_size: int,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.A8w4Linear` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first. A product that is cut along K is finished by a second
    launch, which adds the parts in ascending order: results are the same in every run.

    Raises:
        ConfigError: a group size that does not fit the packed weight.
        InputError: dtypes or devices that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(**epilogue)
    K, N = x.shape[-1], weight.shape[1]
    check_group_size(group_size, K)
    operands = x, x_scale, x_zero_point, weight, weight_scale, weight_sum
    check_product("a8w4_linear", *operands, scales=_SCALES, sums=torch.float32)
    _check_shapes(x, weight, weight_scale, weight_sum, group_size, end)
    M = rows_of("a8w4_linear", x, K, x_scale, x_zero_point)
    x, weight, weight_scale = x.contiguous(), weight.contiguous(), weight_scale.contiguous()
    x_scale, x_zero_point = x_scale.contiguous(), x_zero_point.contiguous()
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("a8w4_linear", x.device, tile_class(M))
    half, run = half_of(group_size, K), run_of(group_size, K)
    steps = triton.cdiv(K, chosen["BLOCK_K"])
    programs, count = cut_along_k(chosen, M, N, steps, x.device)
    written = x.new_empty((count, M, N), dtype=torch.float32) if count > 1 else out
    with launching("a8w4_linear", label, x.device):
        a8w4_linear_kernel[(programs, count)](
            x=x,
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            weight=weight,
            weight_scale=weight_scale,
            weight_sum=weight_sum.contiguous(),
            bias=None if end.bias is None else end.bias.contiguous(),
            out=written,
            M=M,
            N=N,
            K=K,
            group_runs=triton.cdiv(group_size, run),
            scale_stride=0 if group_size == K else N,
            HALF=half,
            TWO_RUNS=run == half,
            LONG_GROUPS=run < group_size < K,
            AS_BITS=sums_as_bits(x.device),
            PER_ROW=x_scale.numel() > 1,
            EVEN_K=K % chosen["BLOCK_K"] == 0,
            EMULATE=is_interpreting(),
            # But for the one that is written, the definition rounds before it adds.
            enable_fp_fusion=False,
            **launch_arguments(end),
            **{**chosen.options(), "SPLIT_K": count},
        )
        if count > 1:
            grid, named = adding("a8w4_linear", written, x_scale, end, out)
            add_splits_kernel[grid](enable_fp_fusion=False, **named)
    return out


def _check_shapes(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    group_size: int,
    end: Epilogue,
) -> None:
    K, N = x.shape[-1], weight.shape[1]
    half = half_of(group_size, K)
    check_shapes(
        "a8w4_linear",
        {
            "weight": (weight, (triton.cdiv(K, 2 * half), N, half)),
            "weight_scale": (weight_scale, (triton.cdiv(K, group_size), N)),
            "weight_sum": (weight_sum, (N,)),
            "bias": (end.bias, (N,)),
            "residual": (end.residual, (*x.shape[:-1], N)),
        },
    )

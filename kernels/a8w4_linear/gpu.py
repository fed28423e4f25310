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
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments
from pt2e_quant.kernels.fused_op import is_interpreting
from pt2e_quant.kernels.launch import check_operands, check_shapes, launching, rows_of
from pt2e_quant.kernels.swapped_gemm.gpu import (
    add_splits_kernel,
    adding,
    tile_of_program,
    write_tile,
)
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, rows_class, tiles_for

__all__ = ["a8w4_linear", "a8w4_linear_kernel"]

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
def _scaled(sums, run, runs, group, weight_scale, weight_sum, columns, in_columns, N, zeros):
    """What a run adds to the total: its sums less the zero points', in float32, times its scale.

    sums is int32[BLOCK_N, BLOCK_M] and zeros int32[BLOCK_M], both sixteen times too large.
    """
    # The last block may have one run, not two.
    inside = in_columns & (run < runs)
    weight_sums = tl.load(weight_sum + run * N + columns, mask=inside, other=0)
    scale = tl.load(weight_scale + group * N + columns, mask=inside, other=0.0).to(tl.float32)
    sums -= weight_sums.to(tl.int32)[:, None] * zeros[None, :]
    return sums.to(tl.float32) * (scale * 0.0625)[:, None]


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def a8w4_linear_kernel(
    x,
    x_scale,
    x_zero_point,
    weight,
    weight_scale,
    weight_sum,
    bias,
    residual,
    out,
    M,
    N,
    K,
    group_runs,
    residual_scale,
    residual_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    BLOCK_K: tl.constexpr,
    TWO_RUNS: tl.constexpr,
    PER_ROW: tl.constexpr,
    EVEN_K: tl.constexpr,
    EMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    SPLIT_K: tl.constexpr,
):
    """One tile of the result, or of its sum over a part of K where SPLIT_K > 1.

    A block is two runs or one (TWO_RUNS); a group is group_runs runs.
    """
    HALF: tl.constexpr = BLOCK_K // 2
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    blocks = tl.cdiv(K, BLOCK_K)
    runs = tl.cdiv(K, HALF) if TWO_RUNS else blocks
    each = tl.cdiv(blocks, SPLIT_K)
    first = tl.program_id(1) * each
    depth = tl.arange(0, HALF)
    # Rows times K passes 2**31 for long batches.
    x_at = x + first * BLOCK_K + rows.to(tl.int64)[None, :] * K + depth[:, None]
    weight_at = weight + first.to(tl.int64) * N * HALF
    weight_at += columns.to(tl.int64)[:, None] * HALF + depth[None, :]
    if PER_ROW:
        zeros = tl.load(x_zero_point + rows, mask=in_rows, other=0) * 16
    else:
        zeros = tl.zeros((BLOCK_M,), dtype=tl.int32) + tl.load(x_zero_point) * 16
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(first, tl.minimum(first + each, blocks)):
        packed = tl.load(weight_at, mask=in_columns[:, None], other=0)
        low_inside, high_inside = in_rows[None, :], in_rows[None, :]
        if not EVEN_K:
            left = K - block * BLOCK_K
            low_inside = low_inside & (depth < left)[:, None]
            high_inside = high_inside & (depth < left - HALF)[:, None]
        low_x = tl.load(x_at, mask=low_inside, other=0)
        high_x = tl.load(x_at + HALF, mask=high_inside, other=0)
        low, high = _halves(packed, EMULATE)
        sums = tl.dot(low, low_x, out_dtype=tl.int32)
        if TWO_RUNS:
            run = 2 * block
            total += _scaled(
                sums, run, runs, run // group_runs, weight_scale, weight_sum,
                columns, in_columns, N, zeros,
            )  # fmt: skip
            sums = tl.dot(high, high_x, out_dtype=tl.int32)
            run += 1
        else:
            run = block
            sums = tl.dot(high, high_x, sums, out_dtype=tl.int32)
        total += _scaled(
            sums, run, runs, run // group_runs, weight_scale, weight_sum,
            columns, in_columns, N, zeros,
        )  # fmt: skip
        x_at += BLOCK_K
        weight_at += N * HALF

    write_tile(
        total, rows, columns, x_scale, bias, residual, out, M, N,
        residual_scale, residual_zero_point, act_low, act_high,
        out_scaling, out_zero_point, out_min, out_max,
        True, PER_ROW, HAS_BIAS, RESIDUAL, ACTIVATION, IS_INTEGER, SPLIT_K,
    )  # fmt: skip


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
    _check(x, x_scale, x_zero_point, weight, weight_scale, weight_sum)
    _check_shapes(x, weight, weight_scale, weight_sum, group_size, end)
    M = rows_of("a8w4_linear", x, K, x_scale, x_zero_point)
    x, weight, weight_scale = x.contiguous(), weight.contiguous(), weight_scale.contiguous()
    x_scale, x_zero_point = x_scale.contiguous(), x_zero_point.contiguous()
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("a8w4_linear", x.device, rows_class(M))
    half, run = half_of(group_size, K), run_of(group_size, K)
    programs, count = cut_along_k(chosen, M, N, triton.cdiv(K, 2 * half), x.device)
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
            BLOCK_K=2 * half,
            TWO_RUNS=run == half,
            PER_ROW=x_scale.numel() > 1,
            EVEN_K=K % (2 * half) == 0,
            EMULATE=is_interpreting(),
            # A fused multiply-add would skip a rounding that the definition has.
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
    half, run = half_of(group_size, K), run_of(group_size, K)
    check_shapes(
        "a8w4_linear",
        {
            "weight": (weight, (triton.cdiv(K, 2 * half), N, half)),
            "weight_scale": (weight_scale, (triton.cdiv(K, group_size), N)),
            "weight_sum": (weight_sum, (triton.cdiv(K, run), N)),
            "bias": (end.bias, (N,)),
            "residual": (end.residual, (*x.shape[:-1], N)),
        },
    )


def _check(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
) -> None:
    check_operands(
        "a8w4_linear",
        {
            "x": (x, (torch.int8,)),
            "x_scale": (x_scale, (torch.float32,)),
            "x_zero_point": (x_zero_point, (torch.int32,)),
            "weight": (weight, (torch.int8,)),
            "weight_scale": (weight_scale, _SCALES),
            "weight_sum": (weight_sum, (torch.int16,)),
        },
    )

"""int8_matmul in Triton: batches of products of two int8 tensors of any strides."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments, write_result
from pt2e_quant.kernels.int8_matmul.batches import Batches, read_batches
from pt2e_quant.kernels.int8_matmul.product_class import product_class
from pt2e_quant.kernels.launch import check_operands, check_shapes, launching
from pt2e_quant.kernels.tiles import TileConfig, tiles_for


@triton.jit(
    do_not_specialize=[
        "left_zero_point",
        "right_zero_point",
        "residual_zero_point",
        "out_zero_point",
        "out_min",
        "out_max",
    ]
)
def int8_matmul_kernel(
    left,
    right,
    bias,
    residual,
    out,
    M,
    N,
    K,
    inner_batches,
    repeats,
    left_outer,
    left_inner,
    left_row,
    left_depth,
    right_outer,
    right_inner,
    right_depth,
    right_column,
    scale,
    left_zero_point,
    right_zero_point,
    residual_scale,
    residual_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    HAS_LEFT_ZERO: tl.constexpr,
    HAS_RIGHT_ZERO: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One tile of one matrix of the result; the arguments are those of `op.Int8Matmul`.

    Matrices are counted by two axes, outer and inner, whose strides are given in elements;
    `repeats` neighbours along the inner one share a right matrix.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    # The tiles of one matrix run side by side: it stays in L2.
    batch, tile = tl.program_id(0) // (tiles_m * tiles_n), tl.program_id(0) % (tiles_m * tiles_n)
    outer, inner = (batch // inner_batches).to(tl.int64), (batch % inner_batches).to(tl.int64)
    rows = (tile % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile // tiles_m) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    in_rows, in_columns = rows < M, columns < N
    left_at = left + outer * left_outer + inner * left_inner
    left_at += (rows.to(tl.int64) * left_row)[:, None] + (depth.to(tl.int64) * left_depth)[None, :]
    right_at = right + outer * right_outer + (inner // repeats) * right_inner
    right_at += (columns.to(tl.int64) * right_column)[None, :]
    right_at += (depth.to(tl.int64) * right_depth)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    # Sums of rows are a product too: adding bytes up one by one takes more time than the matrix
    # units need for the whole step. (Sums of columns would be one of 64 rows: too many.)
    left_sums = tl.zeros((BLOCK_M, 16), dtype=tl.int32)
    ones = tl.full((BLOCK_K, 16), 1, dtype=tl.int8)
    right_sums = tl.zeros((BLOCK_N,), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        inside = depth < K - start
        a = tl.load(left_at, mask=in_rows[:, None] & inside[None, :], other=0)
        b = tl.load(right_at, mask=inside[:, None] & in_columns[None, :], other=0)
        total = tl.dot(a, b, total, out_dtype=tl.int32)
        if HAS_RIGHT_ZERO:
            left_sums = tl.dot(a, ones, left_sums, out_dtype=tl.int32)
        if HAS_LEFT_ZERO:
            right_sums += tl.sum(b.to(tl.int32), axis=0)
        left_at += left_depth * BLOCK_K
        right_at += right_depth * BLOCK_K

    # sum (a - za) (b - zb) = sum ab - zb sum a - za sum b + K za zb; what is masked is 0 in all.
    if HAS_RIGHT_ZERO:
        total -= right_zero_point * tl.max(left_sums, axis=1)[:, None]
    if HAS_LEFT_ZERO:
        total -= left_zero_point * right_sums[None, :]
    if HAS_LEFT_ZERO and HAS_RIGHT_ZERO:
        total += K * left_zero_point * right_zero_point
    real = total.to(tl.float32) * scale
    if HAS_BIAS:
        real += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
    place = batch.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside_out = in_rows[:, None] & in_columns[None, :]
    write_result(
        real, place, inside_out, residual, out, residual_scale, residual_zero_point,
        act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
        RESIDUAL, ACTIVATION, IS_INTEGER,
    )  # fmt: skip


def int8_matmul(
    left: Tensor,
    right: Tensor,
    scale: float,
    left_zero_point: int,
    right_zero_point: int,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Matmul` for the arguments, `tiles` replaces the tables'.

    Operands are read where they lie, unless they have three leading axes or more.

    Raises:
        InputError: dtypes, devices or shapes that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(**epilogue)
    check_operands("int8_matmul", {"left": (left, (torch.int8,)), "right": (right, (torch.int8,))})
    batches = read_batches(left.shape, right.shape)
    M, K, N = left.shape[-2], left.shape[-1], right.shape[-1]
    shape = (*batches.shape, M, N)
    ends = {"bias": (end.bias, (N,)), "residual": (end.residual, shape)}
    check_shapes("int8_matmul", {"left": (left, tuple(left.shape)), **ends})
    out = torch.empty(shape, dtype=end.out_dtype, device=left.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("int8_matmul", left.device, product_class(M, N))
    programs = triton.cdiv(M, chosen["BLOCK_M"]) * triton.cdiv(N, chosen["BLOCK_N"])
    with launching("int8_matmul", label, left.device):
        int8_matmul_kernel[(programs * batches.count,)](
            **_operands(batches, left, right),
            bias=None if end.bias is None else end.bias.contiguous(),
            out=out,
            M=M,
            N=N,
            K=K,
            scale=scale,
            left_zero_point=left_zero_point,
            right_zero_point=right_zero_point,
            HAS_LEFT_ZERO=left_zero_point != 0,
            HAS_RIGHT_ZERO=right_zero_point != 0,
            **launch_arguments(end),
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out


def _operands(batches: Batches, left: Tensor, right: Tensor) -> dict[str, Any]:
    """The matrices with two leading axes, and all their strides."""
    a, b = batches.left_views(left), batches.right_views(right)
    left_strides, right_strides = a.stride(), b.stride()
    return {
        "left": a,
        "right": b,
        "inner_batches": a.shape[1],
        "repeats": batches.repeats,
        "left_outer": left_strides[0],
        "left_inner": left_strides[1],
        "left_row": left_strides[2],
        "left_depth": left_strides[3],
        "right_outer": right_strides[0],
        "right_inner": right_strides[1],
        "right_depth": right_strides[2],
        "right_column": right_strides[3],
    }

"""int8_linear in Triton: one launch from int8 rows to the finished result, two where K is cut."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments, write_result
from pt2e_quant.kernels.int8_linear.product_class import product_class
from pt2e_quant.kernels.launch import check_product, check_shapes, launching, rows_of
from pt2e_quant.kernels.swapped_gemm.gpu import tile_of_program
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, tiles_for


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def int8_linear_kernel(
    x, x_scale, x_zero_point, weight, weight_scale, weight_sum, bias, residual, out, partial, M,
    N, K, residual_scale, residual_zero_point, act_low, act_high, out_scaling, out_zero_point,
    out_min, out_max,
    PER_ROW: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result; the arguments are those of `op.Int8Linear`, by their names.

    Where SPLIT_K > 1, the sums over one of as many runs of K, into int32[SPLIT_K, M, N] partial.
    """
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    depth = tl.arange(0, BLOCK_K)
    first, end = 0, K
    if SPLIT_K > 1:
        each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
        first = tl.program_id(1) * each
        end = tl.minimum(first + each, K)
    # Rows times K passes 2**31 for long batches.
    x_at = x + rows.to(tl.int64)[:, None] * K + (first + depth)[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * K + (first + depth)[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(first, end, BLOCK_K):
        inside = depth < K - start
        left = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0)
        right = tl.load(weight_at, mask=inside[:, None] & in_columns[None, :], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        x_at += BLOCK_K
        weight_at += BLOCK_K

    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside_out = in_rows[:, None] & in_columns[None, :]
    if SPLIT_K > 1:
        run = tl.program_id(1).to(tl.int64) * M * N
        tl.store(partial + run + place, total, mask=inside_out)
    else:
        # Padding contributes 0 to products and is in no sum of weights: the correction is exact.
        sums = tl.load(weight_sum + columns, mask=in_columns, other=0)
        channel_scale = tl.load(weight_scale + columns, mask=in_columns, other=0.0)
        if PER_ROW:
            zero_point = tl.load(x_zero_point + rows, mask=in_rows, other=0)
            scale = tl.load(x_scale + rows, mask=in_rows, other=0.0)
            total -= zero_point[:, None] * sums[None, :]
            real = total.to(tl.float32) * (scale[:, None] * channel_scale[None, :])
        else:
            total -= tl.load(x_zero_point) * sums[None, :]
            real = total.to(tl.float32) * (tl.load(x_scale) * channel_scale[None, :])
        if HAS_BIAS:
            real += tl.load(bias + columns, mask=in_columns, other=0.0).to(tl.float32)[None, :]
        write_result(
            real, place, inside_out, residual, out, residual_scale, residual_zero_point,
            act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
            RESIDUAL, ACTIVATION, IS_INTEGER,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=["SPLITS", "residual_zero_point", "out_zero_point", "out_min", "out_max"]
)
def add_integer_splits_kernel(
    partial,
    x_scale,
    x_zero_point,
    weight_scale,
    weight_sum,
    bias,
    residual,
    out,
    SPLITS,
    size,
    N,
    residual_scale,
    residual_zero_point,
    act_low,
    act_high,
    out_scaling,
    out_zero_point,
    out_min,
    out_max,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of the result (of size = M * N): SPLITS sums in int32, then what follows.

    Integers add up to the same in any order: a split product is the unsplit one to the last bit.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(partial + place, mask=inside, other=0)
    for split in range(1, SPLITS):
        total += tl.load(partial + split * size.to(tl.int64) + place, mask=inside, other=0)
    row, column = place // N, place % N
    sums = tl.load(weight_sum + column, mask=inside, other=0)
    channel_scale = tl.load(weight_scale + column, mask=inside, other=0.0)
    if PER_ROW:
        total -= tl.load(x_zero_point + row, mask=inside, other=0) * sums
        scale = tl.load(x_scale + row, mask=inside, other=0.0)
        real = total.to(tl.float32) * (scale * channel_scale)
    else:
        total -= tl.load(x_zero_point) * sums
        real = total.to(tl.float32) * (tl.load(x_scale) * channel_scale)
    if HAS_BIAS:
        real += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    write_result(
        real, place, inside, residual, out, residual_scale, residual_zero_point,
        act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
        RESIDUAL, ACTIVATION, IS_INTEGER,
    )  # fmt: skip


def int8_linear(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int8Linear` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first. A product of few rows and columns is cut along K, and
    finished by a second launch; the result is the same to the last bit.

    Raises:
        InputError: dtypes or devices that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(**epilogue)
    check_product("int8_linear", x, x_scale, x_zero_point, weight, weight_scale, weight_sum)
    # Scales of rows come as [..., 1], as the operator that chooses them gives them.
    x_scale, x_zero_point = x_scale.reshape(-1), x_zero_point.reshape(-1)
    x, weight = x.contiguous(), weight.contiguous()
    N, K = weight.shape
    M = rows_of("int8_linear", x, K)
    _check_shapes(x, x_scale, x_zero_point, weight, weight_scale, weight_sum, end)
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("int8_linear", x.device, product_class(M, N))
    steps = triton.cdiv(K, chosen["BLOCK_K"])
    programs, count = cut_along_k(chosen, M, N, steps, x.device)
    partial = x.new_empty((count, M, N), dtype=torch.int32) if count > 1 else None
    named = {
        "x_scale": x_scale.contiguous(),
        "x_zero_point": x_zero_point.contiguous(),
        "weight_scale": weight_scale.contiguous(),
        "weight_sum": weight_sum.contiguous(),
        "bias": None if end.bias is None else end.bias.contiguous(),
        "out": out,
        "partial": partial,
        "N": N,
        "PER_ROW": x_scale.numel() > 1,
        **launch_arguments(end),
    }
    with launching("int8_linear", label, x.device):
        int8_linear_kernel[(programs, count)](
            x=x,
            weight=weight,
            M=M,
            K=K,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **named,
            **{**chosen.options(), "SPLIT_K": count},
        )
        if count > 1:
            last = tiles_for("int8_linear", x.device, "add_splits")
            add_integer_splits_kernel[(triton.cdiv(M * N, last["BLOCK"]),)](
                SPLITS=count,
                size=M * N,
                enable_fp_fusion=False,
                **named,
                **last.options(),
            )
    return out


def _check_shapes(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
    end: Epilogue,
) -> None:
    N, K = weight.shape
    rows = x.numel() // K if K else 0
    per = (rows if x_scale.numel() > 1 else 1,)
    check_shapes(
        "int8_linear",
        {
            "x": (x, (*x.shape[:-1], K)),
            "x_scale": (x_scale, per),
            "x_zero_point": (x_zero_point, per),
            "weight_scale": (weight_scale, (N,)),
            "weight_sum": (weight_sum, (N,)),
            "bias": (end.bias, (N,)),
            "residual": (end.residual, (*x.shape[:-1], N)),
        },
    )

"""fp8_linear in Triton, out^T = W x^T so that few rows fill the matrix units; or by cuBLAS."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.core.errors import InputError
from pt2e_quant.kernels.epilogue.epilogue import Activation, Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments
from pt2e_quant.kernels.fused_op import is_interpreting
from pt2e_quant.kernels.launch import check_fp8, check_operands, check_shapes, launching, rows_of
from pt2e_quant.kernels.swapped_gemm.gpu import (
    add_splits_kernel,
    adding,
    tile_of_program,
    write_tile,
)
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, rows_class, tiles_for

_FEWEST_ROWS = 65
"""With fewer rows, time goes into reading the weight, which splits of K spread over the device."""


def takes_scaled_mm(
    M: int,
    N: int,
    K: int,
    x_scale: Tensor,
    weight_scale: Tensor,
    out_dtype: torch.dtype,
    capability: int,
) -> bool:
    """True if `scaled_mm` runs a product, and is for its number of rows.

    cuBLAS needs sizes that are multiples of 16. Scales of rows need Hopper, and give bfloat16.
    """
    if M < _FEWEST_ROWS or N % 16 or K % 16:
        return False
    if x_scale.numel() == 1 and weight_scale.numel() == 1:
        return capability >= 89
    return capability >= 90 and out_dtype is torch.bfloat16


def scaled_mm(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """The product and its scales, without what follows; see `op.Fp8Linear` for the arguments."""
    N, K = weight.shape
    rows = x.reshape(-1, K)
    left, right = x_scale.reshape(-1, 1), weight_scale.reshape(1, -1)
    if left.numel() > 1 or right.numel() > 1:
        left = left.expand(len(rows), 1).contiguous()
        right = right.expand(1, N).contiguous()
    else:
        left, right = left.reshape(()), right.reshape(())
    made = torch._scaled_mm(rows, weight.t(), left, right, out_dtype=out_dtype)
    return made.reshape((*x.shape[:-1], N))


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def fp8_linear_kernel(
    x, x_scale, weight, weight_scale, bias, residual, out, M, N, K, residual_scale,
    residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
    PER_ROW: tl.constexpr, PER_CHANNEL: tl.constexpr, EMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result, or of its sum over a part of K where SPLIT_K > 1."""
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    each = tl.cdiv(tl.cdiv(K, BLOCK_K), SPLIT_K) * BLOCK_K
    first = tl.program_id(1) * each
    depth = tl.arange(0, BLOCK_K)
    # Rows times K passes 2**31 for long batches.
    x_at = x + first + rows.to(tl.int64)[None, :] * K + depth[:, None]
    weight_at = weight + first + columns.to(tl.int64)[:, None] * K + depth[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(first, tl.minimum(first + each, K), BLOCK_K):
        inside = depth < K - start
        left = tl.load(weight_at, mask=in_columns[:, None] & inside[None, :], other=0.0)
        right = tl.load(x_at, mask=inside[:, None] & in_rows[None, :], other=0.0)
        if EMULATE:
            total = tl.dot(left.to(tl.float32), right.to(tl.float32), total)
        else:
            # Hopper adds fp8 products in about 14 bits: a run of 128, then float32.
            total = tl.dot(left, right, total, max_num_imprecise_acc=128)
        x_at += BLOCK_K
        weight_at += BLOCK_K

    if PER_CHANNEL:
        total *= tl.load(weight_scale + columns, mask=in_columns, other=0.0)[:, None]
    else:
        total *= tl.load(weight_scale)
    write_tile(
        total, rows, columns, x_scale, bias, residual, out, M, N,
        residual_scale, residual_zero_point, act_low, act_high,
        out_scaling, out_zero_point, out_min, out_max,
        True, PER_ROW, HAS_BIAS, RESIDUAL, ACTIVATION, IS_INTEGER, SPLIT_K,
    )  # fmt: skip


def fp8_linear(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.Fp8Linear` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first. Without `tiles`, more than 64 rows with nothing fused
    behind them go to `torch._scaled_mm`. A product that is cut along K is finished by a second
    launch, which adds the parts in ascending order: results are the same in every run.

    Raises:
        InputError: dtypes or devices that the kernel does not take.
        UnsupportedError: the GPU has no fp8 products.
    """
    end = Epilogue(**epilogue)
    _check(x, x_scale, weight, weight_scale)
    x, weight = x.contiguous(), weight.contiguous()
    x_scale, weight_scale = x_scale.contiguous(), weight_scale.contiguous()
    N, K = weight.shape
    M = rows_of("fp8_linear", x, K, x_scale)
    if weight_scale.numel() not in (1, N):
        raise InputError(f"fp8_linear takes weight_scale of 1 element or {N}")
    shapes = {"bias": (end.bias, (N,)), "residual": (end.residual, (*x.shape[:-1], N))}
    check_shapes("fp8_linear", shapes)
    if M * N == 0:
        return torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    is_plain = end.activation == Activation.NONE and end.bias is None and end.residual is None
    capability = check_fp8("fp8_linear", x.device)
    if tiles is None and is_plain and not end.is_quantized:
        if takes_scaled_mm(M, N, K, x_scale, weight_scale, end.out_dtype, capability):
            with launching("fp8_linear", label, x.device):
                return scaled_mm(x, x_scale, weight, weight_scale, end.out_dtype)
    chosen = tiles or tiles_for("fp8_linear", x.device, rows_class(M))
    with launching("fp8_linear", label, x.device):
        return _launch(x, x_scale, weight, weight_scale, end, chosen)


def _launch(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    end: Epilogue,
    chosen: TileConfig,
) -> Tensor:
    N, K = weight.shape
    M = x.numel() // K
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    steps = triton.cdiv(K, chosen["BLOCK_K"])
    programs, count = cut_along_k(chosen, M, N, steps, x.device)
    written = x.new_empty((count, M, N), dtype=torch.float32) if count > 1 else out
    fp8_linear_kernel[(programs, count)](
        x=x,
        x_scale=x_scale,
        weight=weight,
        weight_scale=weight_scale,
        bias=None if end.bias is None else end.bias.contiguous(),
        out=written,
        M=M,
        N=N,
        K=K,
        PER_ROW=x_scale.numel() > 1,
        PER_CHANNEL=weight_scale.numel() > 1,
        EMULATE=is_interpreting(),
        enable_fp_fusion=True,
        **launch_arguments(end),
        **{**chosen.options(), "SPLIT_K": count},
    )
    if count > 1:
        grid, named = adding("fp8_linear", written, x_scale, end, out)
        add_splits_kernel[grid](enable_fp_fusion=False, **named)
    return out


def _check(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> None:
    check_operands(
        "fp8_linear",
        {
            "x": (x, (torch.float8_e4m3fn,)),
            "x_scale": (x_scale, (torch.float32,)),
            "weight": (weight, (torch.float8_e4m3fn,)),
            "weight_scale": (weight_scale, (torch.float32,)),
        },
    )

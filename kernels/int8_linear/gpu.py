"""int8_linear in Triton: one launch from int8 rows to the finished result."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import INTEGER_OUTPUTS, Epilogue
from pt2e_quant.kernels.epilogue.gpu import activate, requantize
from pt2e_quant.kernels.launch import check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, rows_class, tiles_for

__all__ = ["int8_linear", "int8_linear_kernel"]


@triton.jit
def _tile(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Which tile a program computes: in stripes of GROUP_M, so that weights stay in L2."""
    program = tl.program_id(0)
    tiles_n = tl.cdiv(N, BLOCK_N)
    stripe = program // (GROUP_M * tiles_n)
    first_m = stripe * GROUP_M
    height = tl.minimum(tl.cdiv(M, BLOCK_M) - first_m, GROUP_M)
    within = program % (GROUP_M * tiles_n)
    return first_m + within % height, within // height


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def int8_linear_kernel(
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
    residual_scale,
    residual_zero_point,
    act_low,
    act_high,
    inverse_scale,
    out_zero_point,
    out_min,
    out_max,
    PER_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of the result; the arguments are those of `op.Int8Linear`, by their names."""
    tile_m, tile_n = _tile(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    depth = tl.arange(0, BLOCK_K)
    # Rows times K passes 2**31 for long batches.
    x_at = x + rows.to(tl.int64)[:, None] * K + depth[None, :]
    weight_at = weight + columns.to(tl.int64)[None, :] * K + depth[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        inside = depth < K - start
        left = tl.load(x_at, mask=in_rows[:, None] & inside[None, :], other=0)
        right = tl.load(weight_at, mask=inside[:, None] & in_columns[None, :], other=0)
        total = tl.dot(left, right, total, out_dtype=tl.int32)
        x_at += BLOCK_K
        weight_at += BLOCK_K

    # Padding contributes 0 to the products and is in no sum of weights: the correction is exact.
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
        real += tl.load(bias + columns, mask=in_columns, other=0.0)[None, :]
    place = rows.to(tl.int64)[:, None] * N + columns[None, :]
    inside_out = in_rows[:, None] & in_columns[None, :]
    if RESIDUAL == "integer":
        added = tl.load(residual + place, mask=inside_out, other=0).to(tl.int32)
        real += (added - residual_zero_point).to(tl.float32) * residual_scale
    elif RESIDUAL == "float":
        real += tl.load(residual + place, mask=inside_out, other=0.0).to(tl.float32)
    real = activate(real, act_low, act_high, ACTIVATION)
    if IS_INTEGER:
        steps = requantize(real, inverse_scale, out_zero_point, out_min, out_max)
        tl.store(out + place, steps.to(out.dtype.element_ty), mask=inside_out)
    else:
        tl.store(out + place, real.to(out.dtype.element_ty), mask=inside_out)


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

    What is not contiguous is copied first.

    Raises:
        InputError: dtypes or devices that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    end = Epilogue(**epilogue)
    _check(x, x_scale, x_zero_point, weight, weight_scale, weight_sum)
    x, weight = x.contiguous(), weight.contiguous()
    residual = None if end.residual is None else end.residual.contiguous()
    N, K = weight.shape
    M = x.numel() // K if K else 0
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("int8_linear", x.device, rows_class(M))
    grid = (triton.cdiv(M, chosen["BLOCK_M"]) * triton.cdiv(N, chosen["BLOCK_N"]),)
    limits = (*end.limits, 0.0, 0.0)
    with launching("int8_linear", label, x.device):
        int8_linear_kernel[grid](
            x=x,
            x_scale=x_scale,
            x_zero_point=x_zero_point,
            weight=weight,
            weight_scale=weight_scale,
            weight_sum=weight_sum,
            bias=end.bias,
            residual=residual,
            out=out,
            M=M,
            N=N,
            K=K,
            residual_scale=end.residual_scale,
            residual_zero_point=end.residual_zero_point,
            act_low=limits[0],
            act_high=limits[1],
            inverse_scale=end.inverse_scale,
            out_zero_point=end.out_zero_point,
            out_min=end.out_min,
            out_max=end.out_max,
            PER_ROW=x_scale.numel() > 1,
            HAS_BIAS=end.bias is not None,
            RESIDUAL=_kind(residual),
            ACTIVATION=str(end.activation),
            IS_INTEGER=end.is_integer,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out


def _check(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    weight_sum: Tensor,
) -> None:
    check_operands(
        "int8_linear",
        {
            "x": (x, (torch.int8,)),
            "x_scale": (x_scale, (torch.float32,)),
            "x_zero_point": (x_zero_point, (torch.int32,)),
            "weight": (weight, (torch.int8,)),
            "weight_scale": (weight_scale, (torch.float32,)),
            "weight_sum": (weight_sum, (torch.int32,)),
        },
    )


def _kind(residual: Tensor | None) -> str:
    if residual is None:
        return "none"
    return "integer" if residual.dtype in INTEGER_OUTPUTS else "float"

"""int4_linear in Triton: out^T = W x^T, weights unpacked in registers in front of the matrix units.

With the weight as the left operand its 4-bit codes go from shared memory to registers and, on
Hopper, straight into wgmma. A word is two 16-bit floats after a shift, one logical operation that
puts a pair of codes into the low bits of 128.0 (bfloat16) or 1024.0 (float16), and one packed
subtraction of 128 or 1024 plus the zero point: both exact. The scale multiplies the float32 sum of
a group, so that no weight is ever rounded. float32 activations are three bfloat16 parts.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments
from pt2e_quant.kernels.fused_op import is_interpreting
from pt2e_quant.kernels.int4_linear.pack import BLOCK, check_group_size
from pt2e_quant.kernels.launch import check_operands, check_shapes, launching
from pt2e_quant.kernels.swapped_gemm.gpu import (
    add_splits_kernel,
    adding,
    multiply_floats,
    tile_of_program,
    write_tile,
)
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, rows_class, tiles_for

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


@triton.jit
def _zero_words(zero_point, IS_HALF: tl.constexpr, EMULATE: tl.constexpr):
    """The zero points that `_weights` subtracts: int32[BLOCK_N, 1] as pairs of 16-bit floats."""
    if EMULATE:
        return zero_point
    elif IS_HALF:
        return zero_point * 0x00010001 | 0x64006400
    else:
        # With the sign: it is added. As int32, 0xC300C300 is negative.
        return zero_point * 0x00010001 | -0x3CFF3D00


@triton.jit
def _weights(words, zeros, IS_HALF: tl.constexpr, EMULATE: tl.constexpr):
    """Codes in bits 0..3 and 16..19 of int32[BLOCK_N, J], less their zero points: [BLOCK_N, 2 J].

    The interpreter has neither bfloat16 arithmetic nor inline assembly; it computes in float32.
    """
    ROWS: tl.constexpr = words.shape[0]
    COLUMNS: tl.constexpr = 2 * words.shape[1]
    if EMULATE:
        low, high = (words & 15) - zeros, ((words >> 16) & 15) - zeros
        return tl.reshape(tl.join(low, high), (ROWS, COLUMNS)).to(tl.float32)
    if IS_HALF:
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b32 t; lop3.b32 t, $1, 0x000F000F, 0x64006400, 0xEA; sub.f16x2 $0, t, $2; }",
            "=r,r,r",
            [words, zeros],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    else:
        # Ampere has no packed addition of bfloat16, but a multiply-add: times 0x3F80, 1.0.
        pairs = tl.inline_asm_elementwise(
            "{ .reg .b32 t, o; lop3.b32 t, $1, 0x000F000F, 0x43004300, 0xEA; "
            "mov.b32 o, 0x3F803F80; fma.rn.bf16x2 $0, t, o, $2; }",
            "=r,r,r",
            [words, zeros],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low = (pairs & 0xFFFF).to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pairs >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.reshape(tl.join(low, high), (ROWS, COLUMNS))


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def int4_linear_kernel(
    x, weight, scale, zero_point, bias, residual, out, M, N, K, group_blocks, residual_scale,
    residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
    QUARTERS: tl.constexpr, HAS_ZERO: tl.constexpr, EVEN_K: tl.constexpr, EMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result, or of its sum over a run of K where SPLIT_K > 1.

    A group is QUARTERS quarters of a block, or group_blocks blocks where QUARTERS is 4.
    """
    tl.static_assert(BLOCK_K == 128, "blocks of pack.py")
    IS_HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    DEPTH: tl.constexpr = 32 * QUARTERS
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    blocks = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(blocks, SPLIT_K)
    first = tl.program_id(1) * each
    depth = tl.arange(0, DEPTH)
    # Rows times K passes 2**31 for long batches.
    x_at = x + first * BLOCK_K + rows.to(tl.int64)[None, :] * K + depth[:, None]
    weight_at = weight + first.to(tl.int64) * N * 16
    weight_at += columns.to(tl.int64)[:, None] * 16 + tl.arange(0, 16)[None, :]
    groups = tl.cdiv(K, 32 * QUARTERS * group_blocks)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for block in range(first, tl.minimum(first + each, blocks)):
        words = tl.load(weight_at, mask=in_columns[:, None], other=0)
        for part in tl.static_range(4 // QUARTERS):
            # The last block may have fewer groups than others.
            group = block // group_blocks if QUARTERS == 4 else block * (4 // QUARTERS) + part
            has_group = in_columns & (group < groups)
            zeros = tl.full((BLOCK_N, 1), 8, dtype=tl.int32)
            if HAS_ZERO:
                at = zero_point + group * N + columns
                zeros = tl.load(at, mask=has_group, other=0).to(tl.int32)[:, None]
            shifts = 4 * QUARTERS * part + 4 * tl.arange(0, QUARTERS)
            quarters = tl.reshape(words[:, None, :] >> shifts[None, :, None], (BLOCK_N, DEPTH // 2))
            weights = _weights(quarters, _zero_words(zeros, IS_HALF, EMULATE), IS_HALF, EMULATE)
            inside = in_rows[None, :]
            if not EVEN_K:
                inside = inside & (depth < K - block * BLOCK_K - DEPTH * part)[:, None]
            rows_of_x = tl.load(x_at + DEPTH * part, mask=inside, other=0.0)
            sums = multiply_floats(weights, rows_of_x, EMULATE)
            group_scale = tl.load(scale + group * N + columns, mask=has_group, other=0.0)
            total += group_scale.to(tl.float32)[:, None] * sums
        x_at += BLOCK_K
        weight_at += N * 16

    write_tile(
        total, rows, columns, None, bias, residual, out, M, N,
        residual_scale, residual_zero_point, act_low, act_high,
        out_scaling, out_zero_point, out_min, out_max,
        False, False, HAS_BIAS, RESIDUAL, ACTIVATION, IS_INTEGER, SPLIT_K,
    )  # fmt: skip


def int4_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **epilogue: Any,
) -> Tensor:
    """Launch the kernel; see `op.Int4Linear` for the arguments, `tiles` replaces the tables'.

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
    _check(x, weight, scale, zero_point)
    _check_shapes(x, weight, scale, zero_point, group_size, end)
    x, weight, scale = x.contiguous(), weight.contiguous(), scale.contiguous()
    M = x.numel() // K if K else 0
    out = torch.empty((*x.shape[:-1], N), dtype=end.out_dtype, device=x.device)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("int4_linear", x.device, rows_class(M))
    programs, count = cut_along_k(chosen, M, N, triton.cdiv(K, BLOCK), x.device)
    written = x.new_empty((count, M, N), dtype=torch.float32) if count > 1 else out
    with launching("int4_linear", label, x.device):
        int4_linear_kernel[(programs, count)](
            x=x,
            weight=weight,
            scale=scale,
            zero_point=None if zero_point is None else zero_point.contiguous(),
            bias=None if end.bias is None else end.bias.contiguous(),
            out=written,
            M=M,
            N=N,
            K=K,
            group_blocks=_group_blocks(group_size, K),
            QUARTERS=min(4, group_size // 32) if group_size != K else 4,
            HAS_ZERO=zero_point is not None,
            EVEN_K=K % BLOCK == 0,
            EMULATE=is_interpreting(),
            enable_fp_fusion=True,
            **launch_arguments(end),
            **{**chosen.options(), "SPLIT_K": count},
        )
        if count > 1:
            grid, named = adding("int4_linear", written, None, end, out)
            add_splits_kernel[grid](enable_fp_fusion=False, **named)
    return out


def _check_shapes(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    group_size: int,
    end: Epilogue,
) -> None:
    K, N = x.shape[-1], weight.shape[1]
    groups = triton.cdiv(K, group_size) if K else 0
    check_shapes(
        "int4_linear",
        {
            "weight": (weight, (triton.cdiv(K, BLOCK), N, BLOCK // 8)),
            "scale": (scale, (groups, N)),
            "zero_point": (zero_point, (groups, N)),
            "bias": (end.bias, (N,)),
            "residual": (end.residual, (*x.shape[:-1], N)),
        },
    )


def _group_blocks(group_size: int, K: int) -> int:
    """Blocks of 128 that a group spans: all of them where it is a whole row."""
    return triton.cdiv(K, BLOCK) if group_size == K else max(1, group_size // BLOCK)


def _check(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> None:
    operands = {
        "x": (x, _FLOATS),
        "weight": (weight, (torch.int32,)),
        "scale": (scale, _FLOATS),
    }
    if zero_point is not None:
        operands["zero_point"] = (zero_point, (torch.uint8,))
    check_operands("int4_linear", operands)

"""sparse_linear in Triton: out^T = W x^T, weights put at their places in registers.

What is saved is memory: 0.59 bytes a weight of 8 bits and 0.34 of 4 are read. The matrix units
multiply the zeros too.
"""

import triton
import triton.language as tl
from torch import Tensor, float16, float32, int8, uint8
from torch import bfloat16 as bf16

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import launch_arguments
from pt2e_quant.kernels.fused_op import is_interpreting
from pt2e_quant.kernels.launch import check_operands, check_shapes, launching, rows_of
from pt2e_quant.kernels.sparse_linear.op import takes_groups
from pt2e_quant.kernels.swapped_gemm.gpu import (
    add_splits_kernel,
    adding,
    multiply_floats,
    tile_of_program,
    write_tile,
)
from pt2e_quant.kernels.swapped_gemm.splits import cut_along_k
from pt2e_quant.kernels.tiles import TileConfig, rows_class, tiles_for

_FLOATS = (float16, bf16, float32)


@triton.jit
def _at_places(first, second, pair):
    """Two values of each four neighbours, [BLOCK_N, J], at their places: float32[BLOCK_N, 4 J]."""
    first, second = first.to(tl.float32), second.to(tl.float32)
    ROWS: tl.constexpr = pair.shape[0]
    COLUMNS: tl.constexpr = 4 * pair.shape[1]
    zero = tl.zeros_like(first)
    one = tl.where(pair < 3, first, zero)
    two = tl.where(pair == 0, second, tl.where((pair == 3) | (pair == 4), first, zero))
    three = tl.where((pair == 1) | (pair == 3), second, tl.where(pair == 5, first, zero))
    four = tl.where((pair == 2) | (pair > 3), second, zero)
    return tl.reshape(tl.join(tl.join(one, three), tl.join(two, four)), (ROWS, COLUMNS))


@triton.jit
def _load_pairs(pairs, column, in_columns, start, pair_bytes, FOURS: tl.constexpr):
    """The two kept values of each four behind `start`, a multiple of 32: int32[BLOCK_N, FOURS]."""
    bits = 3 * tl.arange(0, FOURS)
    at = start // 32 * 3 + (bits >> 3)
    has_byte = in_columns[:, None] & (at < pair_bytes)[None, :]
    has_next = in_columns[:, None] & (((bits & 7) > 5) & (at + 1 < pair_bytes))[None, :]
    pair_at = pairs + column * pair_bytes + at[None, :]
    low = tl.load(pair_at, mask=has_byte, other=0).to(tl.int32)
    high = tl.load(pair_at + 1, mask=has_next, other=0).to(tl.int32)
    return ((low | (high << 8)) >> (bits & 7)[None, :]) & 7


@triton.jit(do_not_specialize=["residual_zero_point", "out_zero_point", "out_min", "out_max"])
def sparse_linear_kernel(
    x, values, pairs, scale, bias, residual, out, M, N, K, groups, pair_bytes, residual_scale,
    residual_zero_point, act_low, act_high, out_scaling, out_zero_point, out_min, out_max,
    IS_BYTE: tl.constexpr, HAS_GROUPS: tl.constexpr, EMULATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, ACTIVATION: tl.constexpr,
    IS_INTEGER: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, SPLIT_K: tl.constexpr,
):  # fmt: skip
    """One tile of the result, or of its sum over a run of K where SPLIT_K > 1.

    IS_BYTE: values of 8 bits, else of 4. HAS_GROUPS: K / groups is a multiple of BLOCK_K.
    """
    IS_HALF: tl.constexpr = x.dtype.element_ty == tl.float16
    FOURS: tl.constexpr = BLOCK_K // 4
    tile_m, tile_n = tile_of_program(M, N, BLOCK_M, BLOCK_N, GROUP_M)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows, in_columns = rows < M, columns < N
    # Rows times K passes 2**31 for long batches.
    of_column = columns.to(tl.int64)[:, None]
    steps = tl.cdiv(K, BLOCK_K)
    each = tl.cdiv(steps, SPLIT_K)
    first_step = tl.program_id(1) * each
    depth = tl.arange(0, BLOCK_K)
    four = tl.arange(0, FOURS)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for step in range(first_step, tl.minimum(first_step + each, steps)):
        start = step * BLOCK_K
        if IS_BYTE:
            place = start // 2 + tl.arange(0, BLOCK_K // 2)
            inside = in_columns[:, None] & (place < K // 2)[None, :]
            codes = tl.load(values + of_column * (K // 2) + place[None, :], mask=inside, other=0)
            first, second = tl.split(tl.reshape(codes, (BLOCK_N, FOURS, 2)))
        else:
            place = start // 4 + four
            inside = in_columns[:, None] & (place < K // 4)[None, :]
            codes = tl.load(values + of_column * (K // 4) + place[None, :], mask=inside, other=0)
            both = codes.to(tl.int32)
            first, second = ((both & 15) ^ 8) - 8, ((both >> 4) ^ 8) - 8
        pair = _load_pairs(pairs, of_column, in_columns, start, pair_bytes, FOURS)
        # Codes are exact in each kind of float. The cast is behind the reshape because Triton 3.6
        # does not compile a product of what was reshaped for Blackwell.
        weights = _at_places(first, second, pair)
        if not EMULATE:
            weights = weights.to(tl.float16 if IS_HALF else tl.bfloat16)
        x_at = x + rows.to(tl.int64)[None, :] * K + (start + depth)[:, None]
        in_x = in_rows[None, :] & (start + depth < K)[:, None]
        sums = multiply_floats(weights, tl.load(x_at, mask=in_x, other=0.0), EMULATE)
        if HAS_GROUPS:
            group = start // (K // groups)
            of_group = tl.load(scale + columns * groups + group, mask=in_columns, other=0.0)
            total += of_group.to(tl.float32)[:, None] * sums
        else:
            total += sums
    if not HAS_GROUPS:
        of_row = tl.load(scale + columns, mask=in_columns, other=0.0)
        total *= of_row.to(tl.float32)[:, None]
    write_tile(
        total, rows, columns, None, bias, residual, out, M, N,
        residual_scale, residual_zero_point, act_low, act_high,
        out_scaling, out_zero_point, out_min, out_max,
        False, False, HAS_BIAS, RESIDUAL, ACTIVATION, IS_INTEGER, SPLIT_K,
    )  # fmt: skip


def sparse_linear(
    x: Tensor,
    values: Tensor,
    pairs: Tensor,
    scale: Tensor,
    *,
    bias: Tensor | None = None,
    label: str = "",
    tiles: TileConfig | None = None,
) -> Tensor:
    """Launch the kernel; see `op.SparseLinear` for the arguments, `tiles` replaces the tables'.

    What is not contiguous is copied first. A product that is cut along K is finished by a second
    launch, which adds the parts in ascending order.

    Raises:
        ConfigError: groups that the kernel does not take.
        InputError: dtypes, shapes or devices that it does not take.
        UnsupportedError: the GPU is too old.
    """
    K, N, groups = x.shape[-1], values.shape[0], scale.shape[1]
    M = _check(x, values, pairs, scale, bias)
    end = Epilogue(bias=None if bias is None else bias.contiguous(), out_dtype=x.dtype)
    out = x.new_empty((*x.shape[:-1], N))
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("sparse_linear", x.device, rows_class(M))
    options = {**chosen.options(), "BLOCK_K": _block(chosen["BLOCK_K"], K // groups, groups)}
    steps = triton.cdiv(K, options["BLOCK_K"])
    programs, count = cut_along_k(chosen, M, N, steps, x.device)
    written = x.new_empty((count, M, N), dtype=float32) if count > 1 else out
    with launching("sparse_linear", label, x.device):
        sparse_linear_kernel[(programs, count)](
            x=x.contiguous(),
            values=values.contiguous(),
            pairs=pairs.contiguous(),
            scale=scale.contiguous(),
            bias=end.bias,
            out=written,
            M=M,
            N=N,
            K=K,
            groups=groups,
            pair_bytes=pairs.shape[1],
            IS_BYTE=values.dtype == int8,
            HAS_GROUPS=groups > 1,
            EMULATE=is_interpreting(),
            enable_fp_fusion=True,
            **launch_arguments(end),
            **{**options, "SPLIT_K": count},
        )
        if count > 1:
            grid, named = adding("sparse_linear", written, None, end, out)
            add_splits_kernel[grid](enable_fp_fusion=False, **named)
    return out


def _block(most: int, group_size: int, groups: int) -> int:
    """The longest step along K that lies in one group: a power of two."""
    return most if groups == 1 else min(most, group_size & -group_size)


def _check(x: Tensor, values: Tensor, pairs: Tensor, scale: Tensor, bias: Tensor | None) -> int:
    operands = {
        "x": (x, _FLOATS),
        "values": (values, (int8, uint8)),
        "pairs": (pairs, (uint8,)),
        "scale": (scale, _FLOATS),
    }
    check_operands("sparse_linear", operands)
    K, N, groups = x.shape[-1], values.shape[0], scale.shape[1]
    M = rows_of("sparse_linear", x, K)
    if K % 4 or not takes_groups(groups, K):
        raise ConfigError(f"sparse_linear takes no rows of {K} in {groups} groups")
    width = K // 2 if values.dtype == int8 else K // 4
    check_shapes(
        "sparse_linear",
        {
            "values": (values, (N, width)),
            "pairs": (pairs, (N, (3 * (K // 4) + 7) // 8)),
            "scale": (scale, (N, groups)),
            "bias": (bias, (N,)),
        },
    )
    return M

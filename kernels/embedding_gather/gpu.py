"""embedding_gather in Triton: a tile of results is some rows and neighbouring columns."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pt2e_quant.kernels.embedding_gather.reference import check_bits, check_table
from pt2e_quant.kernels.epilogue.epilogue import Epilogue
from pt2e_quant.kernels.epilogue.gpu import activate, output_launch_arguments, stored
from pt2e_quant.kernels.launch import check_operands, launching
from pt2e_quant.kernels.tiles import TileConfig, columns_class, tiles_for

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@triton.jit
def _codes(
    table,
    row,
    inside_rows,
    first,
    row_bytes,
    BITS: tl.constexpr,
    IS_SIGNED: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Int32 codes of BLOCK_K columns; bytes behind a row read as 0."""
    if BITS == 4:
        at = first // 2 + tl.arange(0, BLOCK_K // 2)
    else:
        at = first + tl.arange(0, BLOCK_K)
    inside = inside_rows[:, None] & (at < row_bytes)[None, :]
    loaded = tl.load(table + row[:, None] * row_bytes + at[None, :], mask=inside, other=0)
    loaded = loaded.to(tl.int32)
    if BITS == 4:
        codes = tl.interleave(loaded & 15, (loaded >> 4) & 15)
        return (codes ^ 8) - 8 if IS_SIGNED else codes
    else:
        return loaded


@triton.jit(do_not_specialize=["out_zero_point", "out_min", "out_max"])
def embedding_gather_kernel(
    table, scale, zero_point, indices, out, M, V, K, row_bytes, groups, group_size, act_low,
    act_high, out_scaling, out_zero_point, out_min, out_max,
    ACTIVATION: tl.constexpr, IS_INTEGER: tl.constexpr, HAS_ZERO_POINT: tl.constexpr,
    ONE_GROUP: tl.constexpr, BITS: tl.constexpr, IS_SIGNED: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """BLOCK_M indices, BLOCK_K columns."""
    places = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * BLOCK_K
    columns = first + tl.arange(0, BLOCK_K)
    in_places = places < M
    row = tl.load(indices + places, mask=in_places, other=0).to(tl.int64)
    is_known = in_places & (row >= 0) & (row < V)
    steps = _codes(table, row, is_known, first, row_bytes, BITS, IS_SIGNED, BLOCK_K)
    if ONE_GROUP:
        if HAS_ZERO_POINT:
            steps -= tl.load(zero_point + row, mask=is_known, other=0)[:, None]
        step = tl.load(scale + row, mask=is_known, other=0.0).to(tl.float32)[:, None]
    else:
        inside = is_known[:, None] & (columns < K)[None, :]
        group = row[:, None] * groups + (columns // group_size)[None, :]
        if HAS_ZERO_POINT:
            steps -= tl.load(zero_point + group, mask=inside, other=0)
        step = tl.load(scale + group, mask=inside, other=0.0).to(tl.float32)
    real = steps.to(tl.float32) * step
    if not IS_INTEGER:
        # Memory outside of the table is not read, and what was asked of it is no number.
        real = tl.where(is_known[:, None], real, float("nan"))
    is_ours = in_places[:, None] & (columns < K)[None, :]
    place = places[:, None] * K + columns[None, :]
    real = activate(real, act_low, act_high, ACTIVATION)
    made = stored(real, out, out_scaling, out_zero_point, out_min, out_max, IS_INTEGER)
    tl.store(out + place, made, mask=is_ours)


def embedding_gather(
    table: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    indices: Tensor,
    columns: int,
    bits: int = 8,
    is_signed: bool = True,
    *,
    label: str = "",
    tiles: TileConfig | None = None,
    **output: Any,
) -> Tensor:
    """Launch the kernel; see `op.EmbeddingGather` for the arguments, `tiles` replaces the tables'.

    Raises:
        ConfigError: a width that the kernel does not take.
        InputError: dtypes, devices or shapes that the kernel does not take.
        UnsupportedError: the GPU is too old.
    """
    check_bits(bits)
    end = Epilogue(**output)
    wanted: dict[str, tuple[Tensor, tuple[torch.dtype, ...]]] = {
        "table": (table, (torch.int8, torch.uint8) if bits == 8 else (torch.uint8,)),
        "scale": (scale, _FLOATS),
        "indices": (indices, (torch.int64, torch.int32)),
    }
    if zero_point is not None:
        wanted["zero_point"] = (zero_point, (torch.int32,))
    check_operands("embedding_gather", wanted)
    check_table(table, scale, zero_point, columns, bits)
    out = scale.new_empty((*indices.shape, columns), dtype=end.out_dtype)
    if out.numel() == 0:
        return out
    chosen = tiles or tiles_for("embedding_gather", out.device, columns_class(columns))
    M = indices.numel()
    grid = (triton.cdiv(M, chosen["BLOCK_M"]), triton.cdiv(columns, chosen["BLOCK_K"]))
    with launching("embedding_gather", label, out.device):
        embedding_gather_kernel[grid](
            table=table.contiguous(),
            scale=scale.contiguous(),
            zero_point=None if zero_point is None else zero_point.contiguous(),
            indices=indices.contiguous(),
            out=out,
            M=M,
            V=table.shape[0],
            K=columns,
            row_bytes=table.shape[1],
            groups=scale.shape[1],
            group_size=columns // scale.shape[1],
            **output_launch_arguments(end),
            HAS_ZERO_POINT=zero_point is not None,
            ONE_GROUP=scale.shape[1] == 1,
            BITS=bits,
            IS_SIGNED=is_signed,
            # A fused multiply-add would skip a rounding that the definition has.
            enable_fp_fusion=False,
            **chosen.options(),
        )
    return out

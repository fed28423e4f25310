"""What embedding_gather is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_elementwise import compiled_peer, drawn_sizes, integers
from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.embedding_gather.op import cost
from pt2e_quant.kernels.embedding_gather.reference import embedding_gather as reference
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.tiles import TileConfig, columns_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.embedding_gather.gpu", "embedding_gather")


class Operands(NamedTuple):
    """The arguments from table to bits."""

    table: Tensor
    scale: Tensor
    zero_point: Tensor | None
    indices: Tensor
    columns: int
    bits: int


def _make(V: int, K: int, rows: int, *, bits: int) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)
        codes = integers((V, K), device, seed)
        groups = K // 32 if bits == 4 else 1
        if bits == 4:
            codes = pack(codes >> 4, getattr(torch, "int4"))  # noqa: B009  # torch's stubs lack it
        scale = torch.rand((V, groups), device=device, generator=generator) * 0.01
        indices = torch.randint(0, V, (rows,), device=device, generator=generator)
        return Operands(codes, scale, None, indices, K, bits)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    V, groups, rows = drawn_sizes(seed, 900, 60, 300)
    made: Operands = _make(V, 32 * groups, rows, bits=4 if seed % 2 else 8)(device, seed)
    return made


def _float_table(operands: Operands) -> tuple[Tensor, Tensor]:
    # The values do not matter to the time: a table of the same shape.
    return operands.table.new_zeros(
        (len(operands.table), operands.columns), dtype=torch.bfloat16
    ), operands.indices


def _lookup(table: Tensor, indices: Tensor) -> Tensor:
    return F.embedding(indices, table)


def _case(V: int, K: int, rows: int, *, bits: int) -> BenchCase[Operands]:
    meta = torch.device("meta")
    table = torch.empty((V, K * bits // 8), dtype=torch.int8, device=meta)
    scale = torch.empty((V, K // 32 if bits == 4 else 1), device=meta)
    indices = torch.empty(rows, dtype=torch.int64, device=meta)
    return BenchCase(
        name=f"{rows} of {V}x{K} in {bits} bits",
        shape_class=columns_class(K),
        make=_make(V, K, rows, bits=bits),
        cost=cost(table, scale, indices, torch.empty((rows, K), dtype=torch.bfloat16, device=meta)),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(_float_table, _lookup),
    )


_NAMED: dict[str, Any] = {"out_dtype": torch.bfloat16}


def _sweep(columns: tuple[int, ...]) -> tuple[TileConfig, ...]:
    return tile_grid(num_warps=(1, 2, 4, 8), num_stages=(1,), BLOCK_M=(1, 2, 8), BLOCK_K=columns)


BENCH = Bench(
    op="embedding_gather",
    call=lambda operands, tiles: _kernel(*operands, tiles=tiles, **_NAMED),
    reference=lambda operands: reference(*operands, **_NAMED),
    draw=_draw,
    bound=lambda operands: Bound(),
    cases=(
        _case(128256, 4096, 4096, bits=8),
        _case(128256, 4096, 1, bits=8),
        _case(128256, 4096, 4096, bits=4),
        _case(30522, 768, 8192, bits=8),
    ),
    sweep={
        "narrow": _sweep((64, 128)),
        "row": _sweep((256, 512, 1024)),
        "wide": _sweep((512, 1024, 2048)),
        "long": _sweep((1024, 2048)),
    },
)

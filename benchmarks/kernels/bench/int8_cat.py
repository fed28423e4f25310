"""What int8_cat is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_elementwise import compiled_peer, drawn_sizes, integers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_cat.op import cost
from pt2e_quant.kernels.int8_cat.reference import int8_cat as reference
from pt2e_quant.kernels.tiles import TileConfig, columns_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_cat.gpu", "int8_cat")


class Operands(NamedTuple):
    """Rows that are joined along the last axis, as channels-last images are."""

    xs: list[Tensor]


def _arguments(operands: Operands) -> tuple[Any, ...]:
    count = len(operands.xs)
    return operands.xs, -1, [0.02 + 0.01 * i for i in range(count)], list(range(count))


_NAMED: dict[str, Any] = {"out_dtype": torch.int8, "out_scale": 0.04, "out_zero_point": -5}


def _make(M: int, widths: tuple[int, ...]) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        return Operands([integers((M, w), device, seed + i) for i, w in enumerate(widths)])

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    M, *widths = drawn_sizes(seed, 500, *(700,) * (1 + seed % 5))
    made: Operands = _make(M, tuple(widths))(device, seed)
    return made


def _cat(*xs: Tensor) -> Tensor:
    return torch.cat(xs, -1)


def _case(M: int, *widths: int) -> BenchCase[Operands]:
    total = sum(widths)
    xs = [torch.empty((M, w), dtype=torch.int8, device="meta") for w in widths]
    return BenchCase(
        name=f"{M} rows of {'+'.join(map(str, widths))}",
        shape_class=columns_class(total),
        make=_make(M, widths),
        cost=cost(xs, torch.empty((M, total), dtype=torch.int8, device="meta")),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(lambda o: tuple(x.bfloat16() for x in o.xs), _cat),
    )


def _sweep(columns: tuple[int, ...]) -> tuple[TileConfig, ...]:
    return tile_grid(num_warps=(2, 4, 8), num_stages=(1,), BLOCK_M=(1, 4, 16), BLOCK_K=columns)


BENCH = Bench(
    op="int8_cat",
    call=lambda operands, tiles: _kernel(*_arguments(operands), tiles=tiles, **_NAMED),
    reference=lambda operands: reference(*_arguments(operands), **_NAMED),
    draw=_draw,
    bound=lambda operands: Bound(),
    cases=(
        _case(64 * 28 * 28, 256, 32),
        _case(64 * 35 * 35, 64, 64, 96, 32),
        _case(1 * 28 * 28, 256, 32),
        _case(64 * 56 * 56, 64, 32),
        _case(64 * 8 * 8, 1024, 1024),
    ),
    sweep={
        "narrow": _sweep((64, 128)),
        "row": _sweep((128, 256, 512)),
        "wide": _sweep((256, 512, 1024)),
        "long": _sweep((512, 1024, 2048)),
    },
)

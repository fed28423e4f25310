"""What int8_pool is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_elementwise import compiled_peer, drawn_sizes, integers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_pool.op import cost
from pt2e_quant.kernels.int8_pool.reference import int8_pool as reference
from pt2e_quant.kernels.int8_pool.windows import shape_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_pool.gpu", "int8_pool")


class Operands(NamedTuple):
    """Images, channels-last, and what is pooled: a 3x3 maximum of stride 2, or all."""

    x: Tensor
    is_global: bool


def _arguments(operands: Operands) -> tuple[Any, ...]:
    if operands.is_global:
        return ("adaptive", [0, 0], [0, 0], [0, 0], [1, 1])
    out = [(size - 1) // 2 + 1 for size in operands.x.shape[2:]]
    return ("max", [3, 3], [2, 2], [1, 1], out)


_NAMED: dict[str, Any] = {
    "x_scale": 0.02,
    "x_zero_point": -7,
    "out_dtype": torch.int8,
    "out_scale": 0.02,
    "out_zero_point": -7,
}


def _make(shape: tuple[int, ...], *, is_global: bool) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        x = integers(shape, device, seed).to(memory_format=torch.channels_last)
        return Operands(x, is_global)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    made: Operands = _make(drawn_sizes(seed, 4, 300, 20, 20), is_global=seed % 2 == 0)(device, seed)
    return made


def _max(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def _mean(x: Tensor) -> Tensor:
    return x.mean((2, 3), keepdim=True)


def _case(shape: tuple[int, ...], *, is_global: bool) -> BenchCase[Operands]:
    x = torch.empty(shape, dtype=torch.int8, device="meta")
    N, C, H, W = shape
    size = (1, 1) if is_global else ((H - 1) // 2 + 1, (W - 1) // 2 + 1)
    out = torch.empty((N, C, *size), dtype=torch.int8, device="meta")
    return BenchCase(
        name=f"{'x'.join(map(str, shape))} {'global average' if is_global else 'max 3x3 s2'}",
        shape_class=shape_class(size),
        make=_make(shape, is_global=is_global),
        cost=cost(x, out, H * W if is_global else 9),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(lambda o: (o.x.bfloat16(),), _mean if is_global else _max),
    )


BENCH = Bench(
    op="int8_pool",
    call=lambda operands, tiles: _kernel(operands.x, *_arguments(operands), tiles=tiles, **_NAMED),
    reference=lambda operands: reference(operands.x, *_arguments(operands), **_NAMED),
    draw=_draw,
    bound=lambda operands: Bound(),
    cases=(
        _case((64, 64, 112, 112), is_global=False),
        _case((1, 64, 112, 112), is_global=False),
        _case((64, 2048, 7, 7), is_global=True),
        _case((1, 512, 7, 7), is_global=True),
    ),
    sweep={
        "window": tile_grid(
            num_warps=(2, 4, 8), num_stages=(1, 2), BLOCK_P=(4, 8, 16, 32), BLOCK_C=(32, 64, 128)
        ),
        "global": tile_grid(
            num_warps=(1, 2, 4), num_stages=(1, 2), BLOCK_P=(1, 2), BLOCK_C=(64, 128, 256, 512)
        ),
    },
)

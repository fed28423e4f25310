"""What a8w4_linear is checked, timed and tuned on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_peers import FloatLinear, float_linear_peers
from pt2e_quant.kernels.a8w4_linear.op import cost
from pt2e_quant.kernels.a8w4_linear.pack import (
    half_of,
    pack_halves,
    unpack_halves,
    weight_sums,
)
from pt2e_quant.kernels.a8w4_linear.reference import a8w4_linear as reference
from pt2e_quant.kernels.a8w4_linear.reference import split_bound
from pt2e_quant.kernels.a8w4_linear.tile_class import tile_class
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.a8w4_linear.gpu", "a8w4_linear")
_MOST_SPLITS = 16


class Operands(NamedTuple):
    """Arguments of the fused call; the result is bfloat16."""

    x: Tensor
    x_scale: Tensor
    x_zero_point: Tensor
    weight: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    group_size: int


def _operands(
    M: int, N: int, K: int, *, group_size: int, per_row: bool = True
) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(low: int, high: int, *shape: int) -> Tensor:
            made = torch.randint(low, high, shape, device=device, generator=generator)
            return made.to(torch.int8)

        rows = M if per_row else 1
        weight = integers(-8, 8, N, K)
        scale = torch.rand((K // group_size, N), device=device, generator=generator) * 0.01 + 0.001
        scale = scale.to(torch.bfloat16)
        return Operands(
            x=integers(-128, 128, M, K),
            x_scale=torch.rand(rows, device=device, generator=generator) * 0.02 + 0.01,
            x_zero_point=integers(-128, 128, rows).to(torch.int32),
            weight=pack_halves(weight, half_of(group_size, K)),
            weight_scale=scale,
            weight_sum=weight_sums(weight, scale, group_size),
            group_size=group_size,
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes and every group size; every other one with one scale for x."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (300, 700, 1500))
    size = (32, 64, 128, 256, 0)[seed % 5]
    K = K if size == 0 else -(-K // size) * size
    return _operands(M, N, K, group_size=size or K, per_row=seed % 2 == 1)(device, seed)


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands, tiles=tiles, out_dtype=torch.bfloat16)


def _reference(operands: Operands) -> object:
    return reference(*operands, out_dtype=torch.bfloat16)


def _bound(operands: Operands) -> Bound:
    """Of another order of the same float32 numbers, which may turn the rounding to bfloat16."""
    sums = split_bound(*operands, splits=_MOST_SPLITS)
    return Bound(rtol=2.0**-8, atol=float(sums.max()))


def _floats(operands: Operands) -> FloatLinear:
    x, x_scale, x_zero_point, packed, scale, _, size = operands
    weight = unpack_halves(packed, x.shape[1]).float()
    spread = scale.float().t().repeat_interleave(size, dim=1)
    rows = (x.float() - x_zero_point[:, None]) * x_scale[:, None]
    return FloatLinear(rows, weight * spread, None)


_PEERS = float_linear_peers(_floats)


def _case(
    M: int, N: int, K: int, *, group_size: int = 128, target: float | None = None
) -> BenchCase[Operands]:
    make = _operands(M, N, K, group_size=group_size)
    meta = torch.device("meta")
    half = half_of(group_size, K)
    return BenchCase(
        name=f"{M}x{N}x{K} g{group_size}",
        shape_class=tile_class(M),
        make=make,
        cost=cost(
            torch.empty((M, K), dtype=torch.int8, device=meta),
            torch.empty((-(-K // (2 * half)), N, half), dtype=torch.int8, device=meta),
            torch.empty((K // group_size, N), dtype=torch.bfloat16, device=meta),
            torch.empty((N,), dtype=torch.float32, device=meta),
            torch.empty((M, N), dtype=torch.bfloat16, device=meta),
        ),
        unit=MathUnit.INT8,
        peers=_PEERS,
        targets={} if target is None else {"cuBLAS bf16": target},
    )


BENCH = Bench(
    op="a8w4_linear",
    call=_call,
    reference=_reference,
    draw=_draw,
    bound=_bound,
    cases=(
        _case(1, 8192, 8192, target=3.0),
        _case(16, 8192, 8192, target=3.0),
        _case(32, 8192, 8192, target=3.0),
        _case(64, 8192, 8192, target=3.0),
        _case(64, 28672, 8192, target=3.0),
        _case(16, 8192, 8192, group_size=32),
        _case(32, 8192, 8192, group_size=32),
        _case(64, 8192, 8192, group_size=64),
        _case(256, 8192, 8192),
        _case(4096, 4096, 4096),
    ),
    sweep={
        "decode": tile_grid(
            num_warps=(4, 8),
            num_stages=(2, 3, 4, 5),
            BLOCK_M=(16,),
            BLOCK_N=(64, 128, 256),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1, 4, 8, 16),
        ),
        "slim": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(32,),
            BLOCK_N=(64, 128, 256),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1, 4, 8),
        ),
        "skinny": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4, 5),
            BLOCK_M=(64,),
            BLOCK_N=(64, 128, 256),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1, 2, 4, 8),
        ),
        "medium": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(64, 128),
            BLOCK_N=(64, 128),
            BLOCK_K=(128, 256),
            GROUP_M=(2, 4),
            SPLIT_K=(1, 2),
        ),
        "large": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(64, 128),
            BLOCK_N=(64, 128),
            BLOCK_K=(128, 256),
            GROUP_M=(8, 16),
            SPLIT_K=(1,),
        ),
    },
)

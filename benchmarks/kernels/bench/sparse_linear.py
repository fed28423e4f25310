"""What sparse_linear is checked, timed and tuned on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_peers import FloatLinear, float_linear_peers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.sparse_linear.op import cost
from pt2e_quant.kernels.sparse_linear.reference import dequantize_weight
from pt2e_quant.kernels.sparse_linear.reference import sparse_linear as reference
from pt2e_quant.kernels.tiles import TileConfig, rows_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.sparse_linear.gpu", "sparse_linear")
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


class Operands(NamedTuple):
    """Arguments of the fused call."""

    x: Tensor
    values: Tensor
    pairs: Tensor
    scale: Tensor


def _shapes(M: int, N: int, K: int, bits: int, groups: int) -> tuple[tuple[int, int], ...]:
    return (M, K), (N, K * bits // 16), (N, (3 * (K // 4) + 7) // 8), (N, groups)


def _operands(
    M: int, N: int, K: int, *, bits: int, groups: int, dtype: torch.dtype
) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator().manual_seed(seed)
        of_x, of_values, of_pairs, of_scale = _shapes(M, N, K, bits, groups)
        values = torch.randint(0, 256, of_values, dtype=torch.uint8, generator=generator)
        places = torch.randint(0, 6, (N, -(-of_pairs[1] // 3) * 8), generator=generator)
        words = (places.view(N, -1, 8) << 3 * torch.arange(8)).sum(2)
        bytes_ = (words.unsqueeze(2) >> 8 * torch.arange(3) & 255).view(N, -1).to(torch.uint8)
        scale = torch.rand(of_scale, generator=generator) * 0.01 + 0.001
        return Operands(
            x=torch.randn(of_x, generator=generator).to(device, dtype),
            values=(values.view(torch.int8) if bits == 8 else values).to(device),
            pairs=bytes_[:, : of_pairs[1]].contiguous().to(device),
            scale=scale.to(device),
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes, both widths, every dtype, groups of 32 in every other one."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (300, 700, 1500))
    has_groups = seed % 2 == 1
    K = -(-K // 32) * 32 if has_groups else -(-K // 4) * 4
    dtype = tuple(_ROUNDING)[seed % 3]
    groups = K // 32 if has_groups else 1
    return _operands(M, N, K, bits=(8, 4)[seed // 2 % 2], groups=groups, dtype=dtype)(device, seed)


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands, tiles=tiles)


def _reference(operands: Operands) -> object:
    return reference(*operands)


def _bound(operands: Operands) -> Bound:
    """Of float32 sums of K products in any order, and one rounding on either side."""
    x, K = operands.x, operands.x.shape[-1]
    weight = dequantize_weight(*operands[1:], K=K)
    magnitude = float((x.double().abs() @ weight.double().abs().t()).max())
    return Bound(rtol=2 * _ROUNDING[x.dtype], atol=magnitude * (K + 8) * 2.0**-23)


def _floats(operands: Operands) -> FloatLinear:
    return FloatLinear(operands.x, dequantize_weight(*operands[1:], K=operands.x.shape[1]), None)


_PEERS = float_linear_peers(_floats)


def _case(M: int, N: int, K: int, *, bits: int = 8, groups: int = 1) -> BenchCase[Operands]:
    of_x, of_values, of_pairs, of_scale = _shapes(M, N, K, bits, groups)

    def empty(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    x, out = empty(of_x, torch.bfloat16), empty((M, N), torch.bfloat16)
    parts = [empty(shape, torch.uint8) for shape in (of_values, of_pairs)]
    return BenchCase(
        name=f"{M}x{N}x{K} int{bits}{f' g{K // groups}' if groups > 1 else ''}",
        shape_class=rows_class(M),
        make=_operands(M, N, K, bits=bits, groups=groups, dtype=torch.bfloat16),
        cost=cost(x, *parts, empty(of_scale, torch.float32), out),
        unit=MathUnit.HALF,
        peers=_PEERS,
        targets={},
    )


def _sweep(rows: tuple[int, ...], splits: tuple[int, ...]) -> tuple[TileConfig, ...]:
    return tile_grid(
        num_warps=(4, 8),
        num_stages=(2, 3, 4),
        BLOCK_M=rows,
        BLOCK_N=(64, 128),
        BLOCK_K=(64, 128),
        GROUP_M=(8,) if splits == (1,) else (1,),
        SPLIT_K=splits,
    )


BENCH = Bench(
    op="sparse_linear",
    call=_call,
    reference=_reference,
    draw=_draw,
    bound=_bound,
    cases=(
        _case(1, 8192, 8192),
        _case(16, 8192, 8192),
        _case(1, 8192, 8192, bits=4),
        _case(1, 8192, 8192, bits=4, groups=256),
        _case(64, 8192, 8192),
        _case(256, 8192, 8192),
        _case(4096, 4096, 4096),
    ),
    sweep={
        "decode": _sweep((16,), (1, 4, 8, 16)),
        "skinny": _sweep((32, 64), (1, 2, 4)),
        "medium": _sweep((64, 128), (1, 2)),
        "large": _sweep((64, 128, 256), (1,)),
    },
)

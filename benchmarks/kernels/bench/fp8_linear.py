"""What fp8_linear is checked, timed and tuned on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from benchmarks.kernels.bench_peers import FloatLinear, float_linear_peers
from pt2e_quant.kernels.fp8_linear.gpu import scaled_mm
from pt2e_quant.kernels.fp8_linear.op import cost
from pt2e_quant.kernels.fp8_linear.reference import error_bound
from pt2e_quant.kernels.fp8_linear.reference import fp8_linear as reference
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.tiles import TileConfig, rows_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.fp8_linear.gpu", "fp8_linear")
_MOST_SPLITS = 16
_RUN_ERROR = 4 * 2.0**-13
"""Of Hopper, the coarsest; see `reference.error_bound`."""


class Operands(NamedTuple):
    """Arguments of the fused call; the result is bfloat16."""

    x: Tensor
    x_scale: Tensor
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None


def _operands(
    M: int, N: int, K: int, *, per_row: bool, has_bias: bool = False
) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)

        def codes(rows: int, columns: int) -> Tensor:
            drawn = torch.randn((rows, columns), device=device, generator=generator) * 40
            return drawn.clamp(-448, 448).to(torch.float8_e4m3fn)

        def scales(count: int) -> Tensor:
            drawn = torch.rand(count if per_row else 1, device=device, generator=generator)
            return drawn * 0.01 + 0.001

        bias = torch.randn(N, device=device, generator=generator) if has_bias else None
        return Operands(codes(M, K), scales(M), codes(N, K), scales(N), bias)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes, which Triton computes; a third in sizes that cuBLAS takes."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (300, 700, 1500))
    if seed % 3 == 0:
        M, N, K = M + 64, 16 * -(-N // 16), 16 * -(-K // 16)
    return _operands(M, N, K, per_row=seed % 2 == 1, has_bias=seed % 5 == 1)(device, seed)


def _end(operands: Operands) -> dict[str, Any]:
    return {"bias": operands.bias, "out_dtype": torch.bfloat16}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands[:4], tiles=tiles, **_end(operands))


def _reference(operands: Operands) -> object:
    return reference(*operands[:4], **_end(operands))


def _bound(operands: Operands) -> Bound:
    """Of the sums, and one rounding to bfloat16 on either side."""
    sums = error_bound(*operands[:4], splits=_MOST_SPLITS, run_error=_RUN_ERROR)
    return Bound(rtol=2.0**-7, atol=float(sums.max()))


def _floats(operands: Operands) -> FloatLinear:
    x, x_scale, weight, weight_scale, bias = operands
    return FloatLinear(x.float() * x_scale[:, None], weight.float() * weight_scale[:, None], bias)


def _by_cublas(operands: Operands) -> Callable[[], object]:
    return lambda: scaled_mm(*operands[:4], torch.bfloat16)


_FLOAT_PEERS = float_linear_peers(_floats)
_PEERS = {**_FLOAT_PEERS, "torch._scaled_mm": Peer(prepare=_by_cublas, is_float=False)}


def _case(M: int, N: int, K: int, *, per_row: bool, has_bias: bool = False) -> BenchCase[Operands]:
    meta = torch.device("meta")
    x, weight = (torch.empty(s, dtype=torch.float8_e4m3fn, device=meta) for s in ((M, K), (N, K)))
    out = torch.empty((M, N), dtype=torch.bfloat16, device=meta)
    kind = f"{'per row' if per_row else 'per tensor'}{', bias' if has_bias else ''}"
    return BenchCase(
        name=f"{M}x{N}x{K} {kind}",
        shape_class=rows_class(M),
        make=_operands(M, N, K, per_row=per_row, has_bias=has_bias),
        cost=cost(x, weight, out),
        unit=MathUnit.FP8,
        peers=_FLOAT_PEERS if has_bias else _PEERS,
    )


BENCH = Bench(
    op="fp8_linear",
    call=_call,
    reference=_reference,
    draw=_draw,
    bound=_bound,
    lowest_capability=89,
    cases=(
        _case(1, 8192, 8192, per_row=True),
        _case(16, 8192, 8192, per_row=True),
        _case(64, 8192, 8192, per_row=False),
        _case(256, 8192, 8192, per_row=True),
        _case(4096, 4096, 4096, per_row=False),
        _case(4096, 4096, 4096, per_row=True, has_bias=True),
    ),
    sweep={
        "decode": tile_grid(
            num_warps=(4, 8),
            num_stages=(4, 5, 6),
            BLOCK_M=(16,),
            BLOCK_N=(64, 128),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1, 2, 4, 8, 16),
        ),
        "skinny": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4, 5),
            BLOCK_M=(64,),
            BLOCK_N=(64, 128),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1, 2, 4, 8),
        ),
        "medium": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(64, 128),
            BLOCK_N=(64, 128),
            BLOCK_K=(128,),
            GROUP_M=(2, 4),
            SPLIT_K=(1, 2),
        ),
        "large": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(128, 256),
            BLOCK_N=(128,),
            BLOCK_K=(64, 128),
            GROUP_M=(8,),
            SPLIT_K=(1,),
        ),
    },
)

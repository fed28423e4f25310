"""What softmax_quantize is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_elementwise import ROW_SWEEP, compiled_peer, drawn_sizes, floats
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.softmax_quantize.op import cost
from pt2e_quant.kernels.softmax_quantize.reference import softmax_quantize as reference
from pt2e_quant.kernels.tiles import columns_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.softmax_quantize.gpu", "softmax_quantize")
_SCALE = 0.125


class Operands(NamedTuple):
    """Scores and what is added to them."""

    x: Tensor
    mask: Tensor


def _make(B: int, heads: int, S: int) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        x = floats((B, heads, S, S), device, seed)
        causal = torch.ones(S, S, dtype=torch.bool, device=device).triu(1)
        mask = torch.zeros(1, 1, S, S, dtype=x.dtype, device=device)
        return Operands(x, mask.masked_fill(causal, float("-inf")))

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    made: Operands = _make(*drawn_sizes(seed, 2, 5, 300))(device, seed)
    return made


def _float(x: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(x * _SCALE + mask, -1)


def _case(B: int, heads: int, S: int) -> BenchCase[Operands]:
    x = torch.empty((B, heads, S, S), dtype=torch.bfloat16, device="meta")
    return BenchCase(
        name=f"{B}x{heads}x{S}x{S} masked bf16",
        shape_class=columns_class(S),
        make=_make(B, heads, S),
        cost=cost(x, x[:1, :1]),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(lambda o: (o.x, o.mask), _float),
    )


BENCH = Bench(
    op="softmax_quantize",
    call=lambda operands, tiles: _kernel(*operands, _SCALE, operands.x.dtype, tiles=tiles),
    reference=lambda operands: reference(*operands, _SCALE, operands.x.dtype),
    draw=_draw,
    # Other last bits of exp and sums: a result beside a tie may fall to its other side.
    bound=lambda operands: Bound(lsb=1),
    cases=(_case(64, 12, 128), _case(16, 12, 197), _case(4, 32, 1024), _case(1, 32, 2048)),
    # A row must fit one tile.
    sweep={
        **ROW_SWEEP,
        "long": tile_grid(num_warps=(8, 16, 32), num_stages=(1,), BLOCK_M=(1,), BLOCK_K=(16384,)),
    },
)

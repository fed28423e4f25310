"""What quantize_per_token is checked, timed and tuned on."""

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer
from benchmarks.kernels.bench_elementwise import ROW_SWEEP, drawn_floats, floats, q_dq_peer
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.measured import Variant
from pt2e_quant.kernels.quantize_per_token.op import cost
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token as reference
from pt2e_quant.kernels.quantize_per_token.reference import (
    quantize_per_token_e4m3 as e4m3_reference,
)
from pt2e_quant.kernels.tiles import columns_class

__all__ = ["BENCH", "E4M3_BENCH"]

_GPU = "pt2e_quant.kernels.quantize_per_token.gpu"
_kernel = triton_kernel(_GPU, "quantize_per_token")
_e4m3_kernel = triton_kernel(_GPU, "quantize_per_token_e4m3")

_PEERS: dict[str, Peer[Tensor]] = q_dq_peer(lambda x: (x,), lambda x: reference(x))
_E4M3_PEERS: dict[str, Peer[Tensor]] = q_dq_peer(lambda x: (x,), lambda x: e4m3_reference(x))


def _case(
    M: int,
    K: int,
    *,
    to: str = "",
    row_bytes: int = 8,
    peers: dict[str, Peer[Tensor]] = _PEERS,
) -> BenchCase[Tensor]:
    empty = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    return BenchCase(
        name=f"{M}x{K} bf16{to}",
        shape_class=columns_class(K),
        make=lambda device, seed: floats((M, K), device, seed),
        cost=cost(empty, row_bytes),
        unit=MathUnit.FLOAT32,
        peers=peers,
    )


def _to_e4m3(M: int, K: int) -> BenchCase[Tensor]:
    """A scale a row, and no zero point."""
    return _case(M, K, to=" to e4m3", row_bytes=4, peers=_E4M3_PEERS)


BENCH: Bench[Tensor] = Bench(
    op="quantize_per_token",
    call=lambda x, tiles: _kernel(x, tiles=tiles),
    reference=reference,
    draw=drawn_floats,
    bound=lambda x: Bound(),
    cases=(
        _case(65536, 128),
        _case(4096, 768),
        _case(4096, 4096),
        _case(1, 4096),
        _case(64, 14336),
    ),
    sweep=ROW_SWEEP,
)

E4M3_BENCH: Bench[Tensor] = Bench(
    op="quantize_per_token",
    variant=Variant.E4M3,
    call=lambda x, tiles: _e4m3_kernel(x, tiles=tiles),
    reference=e4m3_reference,
    draw=drawn_floats,
    bound=lambda x: Bound(),
    cases=tuple(_to_e4m3(M, K) for M, K in ((65536, 128), (4096, 768), (4096, 4096), (64, 14336))),
    sweep={},
    lowest_capability=FP8_CAPABILITY,
)

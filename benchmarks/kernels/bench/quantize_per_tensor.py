"""What quantize_per_tensor is checked, timed and tuned on."""

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from benchmarks.kernels.bench_elementwise import drawn_floats, floats, q_dq_peer
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.measured import Variant
from pt2e_quant.kernels.quantize_per_tensor.gpu import shape_class
from pt2e_quant.kernels.quantize_per_tensor.op import cost
from pt2e_quant.kernels.quantize_per_tensor.reference import quantize_per_tensor as reference
from pt2e_quant.kernels.quantize_per_tensor.reference import (
    quantize_per_tensor_e4m3 as e4m3_reference,
)

__all__ = ["BENCH", "E4M3_BENCH"]

_GPU = "pt2e_quant.kernels.quantize_per_tensor.gpu"
_kernel = triton_kernel(_GPU, "quantize_per_tensor")
_e4m3_kernel = triton_kernel(_GPU, "quantize_per_tensor_e4m3")

_PEERS: dict[str, Peer[Tensor]] = q_dq_peer(lambda x: (x,), lambda x: reference(x))
_E4M3_PEERS: dict[str, Peer[Tensor]] = q_dq_peer(lambda x: (x,), lambda x: e4m3_reference(x))


def _case(
    M: int, K: int, to: str = "", peers: dict[str, Peer[Tensor]] = _PEERS
) -> BenchCase[Tensor]:
    empty = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    return BenchCase(
        name=f"{M}x{K} bf16{to}",
        shape_class=shape_class(M * K),
        make=lambda device, seed: floats((M, K), device, seed),
        cost=cost(empty),
        unit=MathUnit.FLOAT32,
        peers=peers,
    )


_SIZES = ((1, 4096), (64, 4096), (512, 768), (4096, 4096))

BENCH: Bench[Tensor] = Bench(
    op="quantize_per_tensor",
    call=lambda x, tiles: _kernel(x, tiles=tiles),
    reference=reference,
    draw=drawn_floats,
    bound=lambda x: Bound(),
    cases=tuple(_case(M, K) for M, K in _SIZES),
    sweep={
        "one": tile_grid(num_warps=(4, 8, 16), num_stages=(1,), BLOCK=(8192,), PARTIALS=(1,)),
        "small": tile_grid(
            num_warps=(2, 4, 8), num_stages=(1,), BLOCK=(1024, 2048, 4096), PARTIALS=(64, 128, 256)
        ),
        "large": tile_grid(
            num_warps=(4, 8), num_stages=(1,), BLOCK=(2048, 4096, 8192), PARTIALS=(256, 512, 1024)
        ),
    },
)

E4M3_BENCH: Bench[Tensor] = Bench(
    op="quantize_per_tensor",
    variant=Variant.E4M3,
    call=lambda x, tiles: _e4m3_kernel(x, tiles=tiles),
    reference=e4m3_reference,
    draw=drawn_floats,
    bound=lambda x: Bound(),
    cases=tuple(_case(M, K, " to e4m3", _E4M3_PEERS) for M, K in _SIZES),
    sweep={},
    lowest_capability=FP8_CAPABILITY,
)

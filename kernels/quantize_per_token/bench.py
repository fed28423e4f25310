"""What quantize_per_token is checked, timed and tuned on."""

import torch
from torch import Tensor

from pt2e_quant.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer
from pt2e_quant.kernels.bench_elementwise import ROW_SWEEP, compiled_peer, drawn_sizes, floats
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.quantize_per_token.op import cost
from pt2e_quant.kernels.quantize_per_token.reference import quantize_per_token as reference
from pt2e_quant.kernels.tiles import columns_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.quantize_per_token.gpu", "quantize_per_token")

# No model does this in float: the peer is what Inductor makes of the q/dq graph's own operators.
_PEERS: dict[str, Peer[Tensor]] = compiled_peer(
    lambda x: (x,), lambda x: reference(x), name="torch.compile of the q/dq graph", is_float=False
)


def _draw(device: torch.device, seed: int) -> Tensor:
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    return floats(drawn_sizes(seed, 300, 9000), device, seed, dtype)


def _case(M: int, K: int) -> BenchCase[Tensor]:
    empty = torch.empty(M, K, dtype=torch.bfloat16, device="meta")
    return BenchCase(
        name=f"{M}x{K} bf16",
        shape_class=columns_class(K),
        make=lambda device, seed: floats((M, K), device, seed),
        cost=cost(empty),
        unit=MathUnit.FLOAT32,
        peers=_PEERS,
    )


BENCH: Bench[Tensor] = Bench(
    op="quantize_per_token",
    call=lambda x, tiles: _kernel(x, tiles=tiles),
    reference=reference,
    draw=_draw,
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

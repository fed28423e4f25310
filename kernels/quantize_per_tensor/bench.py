"""What quantize_per_tensor is checked, timed and tuned on."""

import torch
from torch import Tensor

from pt2e_quant.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from pt2e_quant.kernels.bench_elementwise import compiled_peer, drawn_sizes, floats
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.quantize_per_tensor.op import cost
from pt2e_quant.kernels.quantize_per_tensor.reference import quantize_per_tensor as reference
from pt2e_quant.kernels.quantize_per_tensor.shape_class import shape_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.quantize_per_tensor.gpu", "quantize_per_tensor")

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
        shape_class=shape_class(M * K),
        make=lambda device, seed: floats((M, K), device, seed),
        cost=cost(empty),
        unit=MathUnit.FLOAT32,
        peers=_PEERS,
    )


BENCH: Bench[Tensor] = Bench(
    op="quantize_per_tensor",
    call=lambda x, tiles: _kernel(x, tiles=tiles),
    reference=reference,
    draw=_draw,
    bound=lambda x: Bound(),
    cases=(_case(1, 4096), _case(64, 4096), _case(512, 768), _case(4096, 4096)),
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

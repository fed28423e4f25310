"""What units bound by memory share in their benches: operands and the float peer."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Peer, tile_grid
from pt2e_quant.kernels.tiles import TileConfig

__all__ = [
    "BLOCK_SWEEP",
    "ROW_SWEEP",
    "compiled_peer",
    "drawn_floats",
    "drawn_sizes",
    "floats",
    "integers",
    "q_dq_peer",
]

T = TypeVar("T")

BLOCK_SWEEP: dict[str, tuple[TileConfig, ...]] = {
    "small": tile_grid(num_warps=(1, 2, 4), num_stages=(1,), BLOCK=(256, 512, 1024, 2048)),
    "large": tile_grid(num_warps=(4, 8), num_stages=(1,), BLOCK=(1024, 2048, 4096, 8192)),
}
"""Of a kernel over elements."""

ROW_SWEEP: dict[str, tuple[TileConfig, ...]] = {
    "narrow": tile_grid(
        num_warps=(1, 2, 4, 8), num_stages=(1,), BLOCK_M=(8, 16, 32, 64), BLOCK_K=(128,)
    ),
    "row": tile_grid(num_warps=(2, 4, 8), num_stages=(1,), BLOCK_M=(1, 2, 4, 8), BLOCK_K=(1024,)),
    "wide": tile_grid(num_warps=(4, 8, 16), num_stages=(1,), BLOCK_M=(1, 2), BLOCK_K=(4096,)),
    "long": tile_grid(
        num_warps=(4, 8, 16), num_stages=(1, 2), BLOCK_M=(1,), BLOCK_K=(4096, 8192, 16384)
    ),
}
"""Of a kernel over whole rows."""


def integers(shape: Sequence[int], device: torch.device, seed: int) -> Tensor:
    """int8 of a shape, all values alike."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randint(
        -128, 128, tuple(shape), dtype=torch.int8, device=device, generator=generator
    )


def floats(
    shape: Sequence[int], device: torch.device, seed: int, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """Normal values of a shape."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(tuple(shape), device=device, generator=generator).to(dtype)


def drawn_sizes(seed: int, *most: int) -> tuple[int, ...]:
    """Ragged sizes from a seed, each at least 1."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(int(torch.randint(1, m + 1, (), generator=generator)) for m in most)


def drawn_floats(device: torch.device, seed: int) -> Tensor:
    """Up to 300 rows of up to 9000 values, in each dtype in turn."""
    dtype = (torch.bfloat16, torch.float16, torch.float32)[seed % 3]
    return floats(drawn_sizes(seed, 300, 9000), device, seed, dtype)


def compiled_peer(
    operands_of: Callable[[T], tuple[Tensor, ...]],
    run: Callable[..., object],
    *,
    name: str = "torch.compile bf16",
    is_float: bool = True,
) -> dict[str, Peer[T]]:
    """The same computed by Inductor.

    Args:
        operands_of: the tensors that `run` takes, made of the kernel's operands.
        run: plain torch.
        name: of the peer.
        is_float: whether it is what the model would run unquantized.
    """
    compiled = torch.compile(run, dynamic=False)

    def prepare(operands: T) -> Callable[[], object]:
        tensors = operands_of(operands)
        return lambda: compiled(*tensors)

    return {name: Peer(prepare=prepare, is_float=is_float)}


def q_dq_peer(
    operands_of: Callable[[T], tuple[Tensor, ...]], run: Callable[..., object]
) -> dict[str, Peer[T]]:
    """What Inductor makes of the q/dq graph's own operators: no model does a quantize in float."""
    name = "torch.compile of the q/dq graph"
    return compiled_peer(operands_of, run, name=name, is_float=False)

"""What int8_matmul is checked, timed and tuned on: attention's two products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_matmul.op import cost
from pt2e_quant.kernels.int8_matmul.product_class import product_class
from pt2e_quant.kernels.int8_matmul.reference import int8_matmul as reference
from pt2e_quant.kernels.tiles import TileConfig, read_tiles

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_matmul.gpu", "int8_matmul")
_SCALE = 0.0004


class Operands(NamedTuple):
    """Arguments of the fused call; out_scale is None for a result in bfloat16."""

    left: Tensor
    right: Tensor
    left_zero_point: int
    right_zero_point: int
    out_scale: float | None


class Product(NamedTuple):
    """One of attention's products.

    Args:
        batch: sequences.
        heads: of the left side; each group of heads / shared reads one right matrix.
        shared: heads of the right side.
        M: rows of the left side.
        N: columns of the right side.
        K: the axis that is summed over.
        is_scores: whether right is a transposed view (keys), and the result bfloat16.
    """

    batch: int
    heads: int
    shared: int
    M: int
    N: int
    K: int
    is_scores: bool


def _operands(product: Product) -> Callable[[torch.device, int], Operands]:
    batch, heads, shared, M, N, K, is_scores = product

    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)

        def integers(*shape: int) -> Tensor:
            return torch.randint(
                -128, 128, shape, dtype=torch.int8, device=device, generator=generator
            )

        # As models have them: queries and keys are views of [batch, rows, heads, width].
        if is_scores:
            keys = integers(batch, N, shared, K).permute(0, 2, 3, 1)
            return Operands(integers(batch, M, heads, K).transpose(1, 2), keys, 7, -4, None)
        values = integers(batch, K, shared, N).transpose(1, 2)
        return Operands(integers(batch, heads, M, K), values, -128, 3, 0.02 * K**0.5)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes; every other one scores, every third with shared heads."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, 300, (), generator=generator)) for _ in range(3))
    shared = 2 if seed % 3 == 0 else 4
    return _operands(Product(2, 4, shared, M, N, K, seed % 2 == 1))(device, seed)


def _arguments(operands: Operands) -> tuple[Any, ...]:
    left, right, left_zero_point, right_zero_point, _ = operands
    return left, right, _SCALE, left_zero_point, right_zero_point


def _end(operands: Operands) -> dict[str, Any]:
    if operands.out_scale is None:
        return {"out_dtype": torch.bfloat16}
    return {"out_dtype": torch.int8, "out_scale": operands.out_scale, "out_zero_point": -5}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*_arguments(operands), tiles=tiles, **_end(operands))


def _reference(operands: Operands) -> object:
    return reference(*_arguments(operands), **_end(operands))


def _in(dtype: torch.dtype) -> Callable[[Operands], Callable[[], object]]:
    def prepare(operands: Operands) -> Callable[[], object]:
        left = operands.left.to(dtype)
        repeats = left.shape[1] // operands.right.shape[1]
        # A cast keeps the strides: keys stay a transposed view, as a model has them.
        right = operands.right.to(dtype).repeat_interleave(repeats, dim=1)
        return lambda: torch.matmul(left, right)

    return prepare


_PEERS: dict[str, Peer[Operands]] = {
    "cuBLAS bf16": Peer(prepare=_in(torch.bfloat16), is_float=True),
    "cuBLAS fp16": Peer(prepare=_in(torch.float16), is_float=True),
}


def _case(product: Product) -> BenchCase[Operands]:
    batch, heads, shared, M, N, K, is_scores = product
    meta = torch.device("meta")
    left = torch.empty((batch, heads, M, K), dtype=torch.int8, device=meta)
    right = torch.empty((batch, shared, K, N), dtype=torch.int8, device=meta)
    dtype = torch.bfloat16 if is_scores else torch.int8
    out = torch.empty((batch, heads, M, N), dtype=dtype, device=meta)
    return BenchCase(
        name=f"{'scores' if is_scores else 'values'} {batch}x{heads}/{shared} {M}x{N}x{K}",
        shape_class=product_class(M, N),
        make=_operands(product),
        cost=cost(left, right, out),
        unit=MathUnit.INT8,
        peers=_PEERS,
        targets={},
    )


BENCH = Bench(
    op="int8_matmul",
    call=_call,
    reference=_reference,
    draw=_draw,
    # The definition's own steps; a float result is rounded once, to bfloat16.
    bound=lambda operands: Bound(),
    cases=tuple(
        _case(product)
        for M, rows in ((1, 4096), (64, 64), (197, 197), (2048, 2048))
        for product in (
            Product(8, 32, 8, M, rows, 128, True),
            Product(8, 32, 8, M, 128, rows, False),
            Product(8, 12, 12, M, 64, rows, False),
        )
    ),
    sweep={
        name: tile_grid(
            num_warps=(2, 4) if name == "decode" else (4, 8),
            num_stages=(2, 3, 4),
            BLOCK_M=(16,) if name == "decode" else (64, 128, 256),
            BLOCK_N=(32, 64, 128),
            BLOCK_K=(64, 128),
        )
        for name in read_tiles("int8_matmul")
    },
)

"""What int8_linear is checked, timed and tuned on."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from benchmarks.kernels.bench_elementwise import floats, integers
from benchmarks.kernels.bench_peers import FloatLinear, float_linear_peers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_linear.op import cost
from pt2e_quant.kernels.int8_linear.product_class import product_class
from pt2e_quant.kernels.int8_linear.reference import int8_linear as reference
from pt2e_quant.kernels.tiles import TileConfig

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_linear.gpu", "int8_linear")


class Operands(NamedTuple):
    """Arguments of the fused call; out_scale is None for a result in bfloat16.

    A residual is int8 with the qparams `_RESIDUAL`, or bfloat16.
    """

    x: Tensor
    x_scale: Tensor
    x_zero_point: Tensor
    weight: Tensor
    weight_scale: Tensor
    weight_sum: Tensor
    bias: Tensor | None
    out_scale: float | None
    residual: Tensor | None = None
    activation: str = "relu"


_RESIDUAL: dict[str, Any] = {"residual_scale": 0.2, "residual_zero_point": 11}


def _integers(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    return torch.randint(-128, 128, shape, dtype=torch.int8, device=device, generator=generator)


def _operands(
    M: int, N: int, K: int, *, per_row: bool, to_int8: bool
) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)
        rows = M if per_row else 1
        weight = _integers((N, K), device, generator)
        return Operands(
            x=_integers((M, K), device, generator),
            x_scale=torch.rand(rows, device=device, generator=generator) * 0.02 + 0.01,
            x_zero_point=_integers((rows,), device, generator).int(),
            weight=weight,
            weight_scale=torch.rand(N, device=device, generator=generator) * 0.01 + 0.001,
            weight_sum=weight.sum(1, dtype=torch.int32),
            bias=torch.randn(N, device=device, generator=generator),
            out_scale=0.02 * K**0.5 if to_int8 else None,
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes; every other one per row, every third with a float result.

    A third each without a residual, with floats and with integers; a fifth without a bias.
    """
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (400, 700, 1500))
    made = _operands(M, N, K, per_row=seed % 2 == 1, to_int8=seed % 3 > 0)(device, seed)
    added = (None, torch.bfloat16, torch.int8)[(seed + seed // 6) % 3]
    return made._replace(
        bias=None if seed % 5 == 4 else made.bias,
        residual=None if added is None else _summand((M, N), device, seed, added),
        activation=("relu", "none", "hardswish")[seed // 2 % 3],
    )


def _summand(shape: tuple[int, ...], device: torch.device, seed: int, dtype: torch.dtype) -> Tensor:
    if dtype is torch.int8:
        return integers(shape, device, seed + 1)
    return 20 * floats(shape, device, seed + 1, dtype)


def _end(operands: Operands) -> dict[str, Any]:
    out_scale = operands.out_scale
    written: dict[str, Any] = {"out_dtype": torch.bfloat16}
    if out_scale is not None:
        written = {"out_dtype": torch.int8, "out_scale": out_scale, "out_zero_point": -5}
    summand = _RESIDUAL if operands.residual is not None else {}
    ends = {"bias": operands.bias, "activation": operands.activation}
    return {**ends, "residual": operands.residual, **summand, **written}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands[:6], tiles=tiles, **_end(operands))


def _reference(operands: Operands) -> object:
    return reference(*operands[:6], **_end(operands))


def _floats(operands: Operands) -> FloatLinear:
    x = (operands.x.float() - operands.x_zero_point[:, None]) * operands.x_scale[:, None]
    return FloatLinear(x, operands.weight * operands.weight_scale[:, None], operands.bias)


def _int_mm(operands: Operands) -> Callable[[], object]:
    """torch._int_mm, and the same steps after it as a second kernel that Inductor fuses."""
    x, x_scale, x_zero_point, weight, weight_scale, weight_sum, bias, out_scale, *_ = operands
    assert bias is not None  # of every case
    columns = weight.t()

    @torch.compile(dynamic=False)
    def finish(total: Tensor) -> Tensor:
        total = total - x_zero_point[:, None] * weight_sum
        real = torch.relu(total.float() * (x_scale[:, None] * weight_scale) + bias)
        if out_scale is None:
            return real.bfloat16()
        return (torch.round(real / out_scale) - 5).clamp(-128, 127).to(torch.int8)

    return lambda: finish(torch._int_mm(x, columns))


_FLOAT_PEERS = float_linear_peers(_floats, torch.relu)
_PEERS = {**_FLOAT_PEERS, "torch._int_mm + epilogue": Peer(prepare=_int_mm, is_float=False)}


def _case(
    M: int, N: int, K: int, *, per_row: bool, to_int8: bool, targets: dict[str, float]
) -> BenchCase[Operands]:
    make = _operands(M, N, K, per_row=per_row, to_int8=to_int8)
    meta = torch.device("meta")
    x, weight = (torch.empty(s, dtype=torch.int8, device=meta) for s in ((M, K), (N, K)))
    out = torch.empty((M, N), dtype=torch.int8 if to_int8 else torch.bfloat16, device=meta)
    kinds = ("per token" if per_row else "static", "int8" if to_int8 else "bf16")
    return BenchCase(
        name=f"{M}x{N}x{K} {kinds[0]} to {kinds[1]}",
        shape_class=product_class(M, N),
        make=make,
        cost=cost(x, weight, out),
        unit=MathUnit.INT8,
        # _int_mm takes more than 16 rows.
        peers=_PEERS if M > 16 else _FLOAT_PEERS,
        targets=targets,
    )


_LARGE = {"cuBLAS bf16": 1.6, "torch._int_mm + epilogue": 1.2}

BENCH = Bench(
    op="int8_linear",
    call=_call,
    reference=_reference,
    draw=_draw,
    # The definition's own steps; a float result is rounded once, to bfloat16.
    bound=lambda operands: Bound(),
    cases=(
        _case(4096, 4096, 4096, per_row=False, to_int8=True, targets=_LARGE),
        _case(4096, 4096, 4096, per_row=True, to_int8=False, targets=_LARGE),
        _case(8192, 8192, 8192, per_row=False, to_int8=True, targets=_LARGE),
        _case(256, 8192, 8192, per_row=True, to_int8=False, targets={}),
        _case(64, 8192, 8192, per_row=True, to_int8=False, targets={}),
        _case(1, 8192, 8192, per_row=True, to_int8=False, targets={"cuBLAS bf16": 1.0}),
        _case(16, 4096, 4096, per_row=True, to_int8=False, targets={}),
        _case(1, 1024, 4096, per_row=True, to_int8=False, targets={"cuBLAS bf16": 1.0}),
    ),
    sweep={
        "decode": tile_grid(
            num_warps=(2, 4, 8),
            num_stages=(3, 4, 5),
            BLOCK_M=(16,),
            BLOCK_N=(16, 32, 64),
            BLOCK_K=(128, 256, 512),
            GROUP_M=(1,),
            SPLIT_K=(1, 4),
        ),
        "decode_narrow": tile_grid(
            num_warps=(2, 4),
            num_stages=(3, 4),
            BLOCK_M=(16,),
            BLOCK_N=(16, 32, 64),
            BLOCK_K=(128, 256, 512),
            GROUP_M=(1,),
            SPLIT_K=(1, 4, 8, 16),
        ),
        "skinny": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4, 5),
            BLOCK_M=(64,),
            BLOCK_N=(32, 64, 128),
            BLOCK_K=(128, 256),
            GROUP_M=(1,),
            SPLIT_K=(1,),
        ),
        "medium": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(64, 128),
            BLOCK_N=(64, 128, 256),
            BLOCK_K=(64, 128),
            GROUP_M=(1, 4),
            SPLIT_K=(1,),
        ),
        "large": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(64, 128),
            BLOCK_N=(128, 256),
            BLOCK_K=(64, 128),
            GROUP_M=(4, 8),
            SPLIT_K=(1,),
        ),
    },
)

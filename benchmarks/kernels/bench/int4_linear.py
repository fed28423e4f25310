"""What int4_linear is checked, timed and tuned on."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer, tile_grid
from benchmarks.kernels.bench_peers import FloatLinear, float_linear_peers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int4_linear.op import cost
from pt2e_quant.kernels.int4_linear.pack import OFFSET, pack_codes, unpack_codes
from pt2e_quant.kernels.int4_linear.reference import dequantize_weight, error_bound
from pt2e_quant.kernels.int4_linear.reference import int4_linear as reference
from pt2e_quant.kernels.tiles import TileConfig, rows_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int4_linear.gpu", "int4_linear")
_MOST_SPLITS = 8
_ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-23}


class Operands(NamedTuple):
    """Arguments of the fused call; the result has the dtype of x."""

    x: Tensor
    weight: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group_size: int


def _operands(
    M: int, N: int, K: int, *, group_size: int, dtype: torch.dtype, has_zero: bool
) -> Callable[[torch.device, int], Operands]:
    def make(device: torch.device, seed: int) -> Operands:
        generator = torch.Generator(device).manual_seed(seed)

        def codes(rows: int, columns: int) -> Tensor:
            return torch.randint(
                0, 16, (rows, columns), dtype=torch.uint8, device=device, generator=generator
            )

        groups = K // group_size
        scale = torch.rand((groups, N), device=device, generator=generator) * 0.01 + 0.001
        return Operands(
            x=torch.randn((M, K), device=device, generator=generator).to(dtype),
            weight=pack_codes(codes(N, K)),
            scale=scale.to(dtype),
            zero_point=codes(groups, N) if has_zero else None,
            group_size=group_size,
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Ragged sizes, every group size and dtype, zero points in every other one."""
    generator = torch.Generator().manual_seed(seed)
    M, N, K = (int(torch.randint(1, most, (), generator=generator)) for most in (300, 700, 1500))
    size = (32, 64, 128, 256, 0)[seed % 5]
    dtype = tuple(_ROUNDING)[seed % 3]
    K = K if size == 0 else -(-K // size) * size
    make = _operands(M, N, K, group_size=size or K, dtype=dtype, has_zero=seed % 2 == 1)
    return make(device, seed)


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(*operands, tiles=tiles, out_dtype=operands.x.dtype)


def _reference(operands: Operands) -> object:
    return reference(*operands, out_dtype=operands.x.dtype)


def _bound(operands: Operands) -> Bound:
    """Of the sums, and one rounding to the result's dtype on either side."""
    sums = error_bound(*operands, splits=_MOST_SPLITS)
    return Bound(rtol=2 * _ROUNDING[operands.x.dtype], atol=float(sums.max()))


def _floats(operands: Operands) -> FloatLinear:
    weight = dequantize_weight(*operands[1:], K=operands.x.shape[1])
    return FloatLinear(operands.x, weight, None)


def _tile_packed(operands: Operands) -> Callable[[], object]:
    """In tiles as torchao packs: (code - 8) * scale + zero, even k's in the high half."""
    x, weight, scale, zero_point, group_size = operands
    codes = unpack_codes(weight, x.shape[1])
    packed = torch.ops.aten._convert_weight_to_int4pack(codes[:, ::2] << 4 | codes[:, 1::2], 8)
    zeros = torch.zeros_like(scale) if zero_point is None else (OFFSET - zero_point.float()) * scale
    both = torch.stack([scale, zeros.to(scale.dtype)], dim=-1).contiguous()
    return lambda: torch.ops.aten._weight_int4pack_mm(x, packed, group_size, both)


_FLOAT_PEERS = float_linear_peers(_floats)
_PEERS = {**_FLOAT_PEERS, "torch._weight_int4pack_mm": Peer(prepare=_tile_packed, is_float=False)}


def _case(
    M: int,
    N: int,
    K: int,
    *,
    group_size: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    has_zero: bool = False,
    targets: dict[str, float] | None = None,
) -> BenchCase[Operands]:
    meta = torch.device("meta")
    x, out = (torch.empty(shape, dtype=dtype, device=meta) for shape in ((M, K), (M, N)))
    weight = torch.empty((-(-K // 128), N, 16), dtype=torch.int32, device=meta)
    scale = torch.empty((K // group_size, N), dtype=dtype, device=meta)
    zeros = scale.to(torch.uint8) if has_zero else None
    kind = str(dtype).removeprefix("torch.")
    is_bf16 = dtype is torch.bfloat16
    return BenchCase(
        name=f"{M}x{N}x{K} {kind} g{group_size}{' zero points' if has_zero else ''}",
        shape_class=rows_class(M),
        make=_operands(M, N, K, group_size=group_size, dtype=dtype, has_zero=has_zero),
        cost=cost(x, weight, scale, zeros, out),
        unit=MathUnit.HALF,
        # torch's operator takes bfloat16 alone.
        peers=_PEERS if is_bf16 else _FLOAT_PEERS,
        targets=targets or {},
    )


_SMALL = {"cuBLAS bf16": 3.0, "torch._weight_int4pack_mm": 1.0}

BENCH = Bench(
    op="int4_linear",
    call=_call,
    reference=_reference,
    draw=_draw,
    bound=_bound,
    cases=(
        _case(1, 8192, 8192, targets=_SMALL),
        _case(16, 8192, 8192, targets=_SMALL),
        _case(1, 28672, 8192, targets=_SMALL),
        _case(16, 28672, 8192, targets=_SMALL),
        _case(1, 4096, 4096, has_zero=True),
        _case(1, 8192, 8192, group_size=32),
        _case(1, 8192, 8192, dtype=torch.float16),
        _case(64, 8192, 8192),
        _case(256, 8192, 8192),
        _case(4096, 4096, 4096),
    ),
    sweep={
        "decode": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4, 5, 6),
            BLOCK_M=(16,),
            BLOCK_N=(64, 128, 256),
            BLOCK_K=(128,),
            GROUP_M=(1,),
            SPLIT_K=(1, 2, 4, 8, 16),
        ),
        "skinny": tile_grid(
            num_warps=(4, 8),
            num_stages=(3, 4),
            BLOCK_M=(32, 64),
            BLOCK_N=(64, 128),
            BLOCK_K=(128,),
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
            num_stages=(2, 3, 4),
            BLOCK_M=(64, 128, 256),
            BLOCK_N=(64, 128),
            BLOCK_K=(128,),
            GROUP_M=(8, 16),
            SPLIT_K=(1,),
        ),
    },
)

"""What int8_add is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit
from benchmarks.kernels.bench_elementwise import BLOCK_SWEEP, compiled_peer, drawn_sizes, integers
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.int8_add.op import cost
from pt2e_quant.kernels.int8_add.reference import int8_add as reference
from pt2e_quant.kernels.tiles import elements_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.int8_add.gpu", "int8_add")


class Operands(NamedTuple):
    """Two int8 tensors and how they are combined."""

    x: Tensor
    y: Tensor
    combine: str


def _named(operands: Operands) -> dict[str, Any]:
    return {
        "combine": operands.combine,
        "x_scale": 0.02,
        "x_zero_point": -7,
        "y_scale": 0.03,
        "activation": "relu",
        "out_dtype": torch.int8,
        "out_scale": 0.04,
        "out_zero_point": -128,
    }


def _make(shape: tuple[int, ...], gate: tuple[int, ...] | None) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        x, y = integers(shape, device, seed), integers(gate or shape, device, seed + 1)
        rows = torch.channels_last
        return Operands(
            x.to(memory_format=rows), y.to(memory_format=rows), "mul" if gate else "add"
        )

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    N, C, H, W = drawn_sizes(seed, 4, 70, 20, 20)
    made: Operands = _make((N, C, H, W), (N, C, 1, 1) if seed % 2 else None)(device, seed)
    return made


def _float(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x + y)


def _float_gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.relu(x * y)


def _case(shape: tuple[int, ...], gate: tuple[int, ...] | None) -> BenchCase[Operands]:
    meta = torch.empty(shape, dtype=torch.int8, device="meta")
    y = torch.empty(gate or shape, dtype=torch.int8, device="meta")
    what = "gate" if gate else "sum"
    return BenchCase(
        name=f"{'x'.join(map(str, shape))} {what}, channels-last",
        shape_class=elements_class(meta.numel()),
        make=_make(shape, gate),
        cost=cost(meta, y, meta),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(
            lambda o: (o.x.bfloat16(), o.y.bfloat16()), _float_gate if gate else _float
        ),
    )


BENCH = Bench(
    op="int8_add",
    call=lambda operands, tiles: _kernel(operands.x, operands.y, tiles=tiles, **_named(operands)),
    reference=lambda operands: reference(operands.x, operands.y, **_named(operands)),
    draw=_draw,
    bound=lambda operands: Bound(),
    cases=(
        _case((64, 256, 56, 56), None),
        _case((64, 672, 14, 14), (64, 672, 1, 1)),
        _case((1, 256, 14, 14), None),
    ),
    sweep=BLOCK_SWEEP,
)

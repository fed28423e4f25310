"""What quantize is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pt2e_quant.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer
from pt2e_quant.kernels.bench_elementwise import (
    BLOCK_SWEEP,
    compiled_peer,
    drawn_sizes,
    floats,
    integers,
)
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.quantize.op import cost
from pt2e_quant.kernels.quantize.reference import quantize as reference
from pt2e_quant.kernels.tiles import elements_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize")
_OUTPUT: dict[str, Any] = {"out_dtype": torch.int8, "out_scale": 0.03, "out_zero_point": -5}
_INPUT: dict[str, Any] = {"x_scale": 0.02, "x_zero_point": 3}


class Operands(NamedTuple):
    """A tensor, int8 or float, and the function between its q/dq."""

    x: Tensor
    activation: str


def _named(operands: Operands) -> dict[str, Any]:
    qparams = _INPUT if operands.x.dtype is torch.int8 else {}
    return {**qparams, **_OUTPUT, "activation": operands.activation}


def _make(elements: int, activation: str, *, is_integer: bool) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        made = integers if is_integer else floats
        return Operands(made((elements,), device, seed), activation)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    (elements,) = drawn_sizes(seed, 2**20)
    activation = ("none", "gelu", "relu")[seed % 3]
    made: Operands = _make(elements, activation, is_integer=seed % 2 == 1)(device, seed)
    return made


_PEERS: dict[str, dict[str, Peer[Operands]]] = {
    "gelu": compiled_peer(lambda o: (o.x.bfloat16(),), F.gelu),
    "none": compiled_peer(
        lambda o: (o.x,),
        lambda x: reference(x, **_OUTPUT),
        name="torch.compile of the q/dq graph",
        is_float=False,
    ),
}


def _case(elements: int, activation: str, *, is_integer: bool) -> BenchCase[Operands]:
    kind = torch.int8 if is_integer else torch.bfloat16
    x = torch.empty(elements, dtype=kind, device="meta")
    return BenchCase(
        name=f"{elements} {kind} {activation} to int8",
        shape_class=elements_class(elements),
        make=_make(elements, activation, is_integer=is_integer),
        cost=cost(x, torch.empty_like(x, dtype=torch.int8)),
        unit=MathUnit.FLOAT32,
        peers=_PEERS[activation],
    )


BENCH = Bench(
    op="quantize",
    call=lambda operands, tiles: _kernel(operands.x, tiles=tiles, **_named(operands)),
    reference=lambda operands: reference(operands.x, **_named(operands)),
    draw=_draw,
    # gelu's erf has other last bits.
    bound=lambda operands: Bound(lsb=1 if operands.activation == "gelu" else 0),
    cases=(
        _case(2**24, "none", is_integer=False),
        _case(2**24, "gelu", is_integer=True),
        _case(2**24, "gelu", is_integer=False),
        _case(2**16, "gelu", is_integer=False),
    ),
    sweep=BLOCK_SWEEP,
)

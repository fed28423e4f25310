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
from pt2e_quant.kernels.epilogue.epilogue import Activation
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.quantize.op import cost
from pt2e_quant.kernels.quantize.reference import quantize as reference
from pt2e_quant.kernels.quantize.reference import quantize_pixels as pixels_reference
from pt2e_quant.kernels.tiles import TileConfig, elements_class

__all__ = ["BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize")
_pixels_kernel = triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize_pixels")
_OUTPUT: dict[str, Any] = {"out_dtype": torch.int8, "out_scale": 0.03, "out_zero_point": -5}
_INPUT: dict[str, Any] = {"x_scale": 0.02, "x_zero_point": 3}
_PIXELS: dict[str, Any] = {"out_scale": 0.03, "out_zero_point": -5}
_LIMITS = {Activation.CLAMP: [-0.5, 6.0], Activation.LEAKY_RELU: [0.1]}
_EXACT = {
    *(Activation.NONE, Activation.RELU, Activation.CLAMP),
    *(Activation.LEAKY_RELU, Activation.HARDSWISH),
}


class Operands(NamedTuple):
    """A tensor, int8 or float, and the function between its q/dq; images of floats have none."""

    x: Tensor
    activation: str


def _named(operands: Operands) -> dict[str, Any]:
    qparams = _INPUT if operands.x.dtype is torch.int8 else {}
    activation = Activation(operands.activation)
    limits = _LIMITS.get(activation, [])
    return {**qparams, **_OUTPUT, "activation": str(activation), "limits": limits}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    if operands.x.dim() == 4:
        return _pixels_kernel(operands.x, tiles=tiles, **_PIXELS)
    return _kernel(operands.x, tiles=tiles, **_named(operands))


def _reference(operands: Operands) -> object:
    if operands.x.dim() == 4:
        return pixels_reference(operands.x, **_PIXELS)
    return reference(operands.x, **_named(operands))


def _make(elements: int, activation: str, *, is_integer: bool) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        made = integers if is_integer else floats
        return Operands(made((elements,), device, seed), activation)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Every function in turn, on integers and on floats; each fifth seed an image."""
    if seed % 5 == 4:
        N, C, H, W = drawn_sizes(seed, 3, 4, 40, 40)
        image = floats((N, C, H, W), device, seed)
        # Planar, or with the channels of a pixel side by side.
        is_planar = seed % 2 == 0
        return Operands(image if is_planar else image.to(memory_format=torch.channels_last), "none")
    (elements,) = drawn_sizes(seed, 2**20)
    activation = list(Activation)[seed // 2 % len(Activation)]
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
    call=_call,
    reference=_reference,
    draw=_draw,
    # exp and erf have other last bits.
    bound=lambda operands: Bound(lsb=0 if operands.activation in _EXACT else 1),
    cases=(
        _case(2**24, "none", is_integer=False),
        _case(2**24, "gelu", is_integer=True),
        _case(2**24, "gelu", is_integer=False),
        _case(2**16, "gelu", is_integer=False),
    ),
    sweep=BLOCK_SWEEP,
)

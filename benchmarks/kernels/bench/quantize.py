"""What quantize is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, Peer
from benchmarks.kernels.bench_elementwise import (
    BLOCK_SWEEP,
    compiled_peer,
    drawn_sizes,
    floats,
    integers,
    q_dq_peer,
)
from pt2e_quant.kernels.epilogue.epilogue import Activation
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.measured import Variant
from pt2e_quant.kernels.quantize.op import cost
from pt2e_quant.kernels.quantize.reference import PIXEL
from pt2e_quant.kernels.quantize.reference import quantize as reference
from pt2e_quant.kernels.quantize.reference import quantize_pixels as pixels_reference
from pt2e_quant.kernels.tiles import TileConfig, elements_class

__all__ = ["BENCH", "E4M3_BENCH", "PIXELS_BENCH"]

_kernel = triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize")
_pixels_kernel = triton_kernel("pt2e_quant.kernels.quantize.gpu", "quantize_pixels")
_OUTPUT: dict[str, Any] = {"out_dtype": torch.int8, "out_scale": 0.03, "out_zero_point": -5}
_E4M3_OUTPUT: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "out_scale": 0.01}
_INPUT: dict[str, Any] = {"x_scale": 0.02, "x_zero_point": 3}
_PIXELS: dict[str, Any] = {"out_scale": 0.03, "out_zero_point": -5}
_LIMITS = {Activation.CLAMP: [-0.5, 6.0], Activation.LEAKY_RELU: [0.1]}
_EXACT = {
    *(Activation.NONE, Activation.RELU, Activation.CLAMP),
    *(Activation.LEAKY_RELU, Activation.HARDSWISH),
}


class Operands(NamedTuple):
    """A tensor, int8 or float, and the function between its q/dq."""

    x: Tensor
    activation: str


def _named(operands: Operands) -> dict[str, Any]:
    qparams = _INPUT if operands.x.dtype is torch.int8 else {}
    activation = Activation(operands.activation)
    limits = _LIMITS.get(activation, [])
    return {**qparams, "activation": str(activation), "limits": limits}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(operands.x, tiles=tiles, **_named(operands), **_OUTPUT)


def _call_e4m3(operands: Operands, tiles: TileConfig | None) -> object:
    return _kernel(operands.x, tiles=tiles, **_named(operands), **_E4M3_OUTPUT)


def _make(elements: int, activation: str, *, is_integer: bool) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        made = integers if is_integer else floats
        return Operands(made((elements,), device, seed), activation)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    """Every function in turn, on integers and on floats."""
    (elements,) = drawn_sizes(seed, 2**20)
    activation = list(Activation)[seed // 2 % len(Activation)]
    made: Operands = _make(elements, activation, is_integer=seed % 2 == 1)(device, seed)
    return made


def _draw_image(device: torch.device, seed: int) -> Tensor:
    """Planar, or with the channels of a pixel side by side."""
    image = floats(drawn_sizes(seed, 3, 4, 40, 40), device, seed)
    return image if seed % 2 == 0 else image.to(memory_format=torch.channels_last)


def _bound(operands: Operands) -> Bound:
    """What computes exp and erf has other last bits."""
    return Bound(lsb=0 if operands.activation in _EXACT else 1)


_PEERS: dict[str, dict[str, Peer[Operands]]] = {
    "gelu": compiled_peer(lambda o: (o.x.bfloat16(),), F.gelu),
    "none": q_dq_peer(lambda o: (o.x,), lambda x: reference(x, **_OUTPUT)),
    "none to e4m3": q_dq_peer(lambda o: (o.x,), lambda x: reference(x, **_E4M3_OUTPUT)),
}
_PIXELS_PEERS: dict[str, Peer[Tensor]] = q_dq_peer(
    lambda x: (x,), lambda x: pixels_reference(x, **_PIXELS)
)


def _case(
    elements: int, activation: str, *, is_integer: bool, to: str = "int8"
) -> BenchCase[Operands]:
    kind = torch.int8 if is_integer else torch.bfloat16
    x = torch.empty(elements, dtype=kind, device="meta")
    is_lone_e4m3 = (activation, to) == ("none", "e4m3")
    return BenchCase(
        name=f"{elements} {kind} {activation} to {to}",
        shape_class=elements_class(elements),
        make=_make(elements, activation, is_integer=is_integer),
        cost=cost(x, torch.empty_like(x, dtype=torch.int8)),
        unit=MathUnit.FLOAT32,
        peers=_PEERS["none to e4m3" if is_lone_e4m3 else activation],
    )


def _image(N: int, C: int, H: int, W: int) -> BenchCase[Tensor]:
    x, out = (torch.empty(N, c, H, W, dtype=torch.int8, device="meta") for c in (C, PIXEL))
    return BenchCase(
        name=f"{N}x{C}x{H}x{W} bf16 to pixels",
        shape_class=elements_class(PIXEL * N * H * W),
        make=lambda device, seed: floats((N, C, H, W), device, seed),
        cost=cost(x.bfloat16(), out),
        unit=MathUnit.FLOAT32,
        peers=_PIXELS_PEERS,
    )


BENCH = Bench(
    op="quantize",
    call=_call,
    reference=lambda operands: reference(operands.x, **_named(operands), **_OUTPUT),
    draw=_draw,
    bound=_bound,
    cases=(
        _case(2**24, "none", is_integer=False),
        _case(2**24, "gelu", is_integer=True),
        _case(2**24, "gelu", is_integer=False),
        _case(2**16, "gelu", is_integer=False),
    ),
    sweep=BLOCK_SWEEP,
)

E4M3_BENCH = Bench(
    op="quantize",
    variant=Variant.E4M3,
    call=_call_e4m3,
    reference=lambda operands: reference(operands.x, **_named(operands), **_E4M3_OUTPUT),
    draw=_draw,
    bound=_bound,
    cases=(
        _case(2**24, "none", is_integer=False, to="e4m3"),
        _case(2**24, "gelu", is_integer=False, to="e4m3"),
        _case(2**16, "gelu", is_integer=False, to="e4m3"),
    ),
    sweep={},
    lowest_capability=FP8_CAPABILITY,
)

PIXELS_BENCH = Bench(
    op="quantize",
    variant=Variant.PIXELS,
    call=lambda x, tiles: _pixels_kernel(x, tiles=tiles, **_PIXELS),
    reference=lambda x: pixels_reference(x, **_PIXELS),
    draw=_draw_image,
    bound=lambda x: Bound(),
    cases=(_image(1, 3, 224, 224), _image(64, 3, 224, 224)),
    sweep={},
)

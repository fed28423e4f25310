"""What norm_quantize is checked, timed and tuned on."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.bench_case import Bench, BenchCase, Bound, MathUnit, tile_grid
from benchmarks.kernels.bench_elementwise import ROW_SWEEP, compiled_peer, drawn_sizes, floats
from pt2e_quant.kernels.fused_op import triton_kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.measured import Variant
from pt2e_quant.kernels.norm_quantize import reference
from pt2e_quant.kernels.norm_quantize.op import cost
from pt2e_quant.kernels.tiles import TileConfig, columns_class

__all__ = ["BENCH", "E4M3_BENCH"]

_GPU = "pt2e_quant.kernels.norm_quantize.gpu"
_static = triton_kernel(_GPU, "norm_quantize")
_per_token = triton_kernel(_GPU, "norm_quantize_per_token")
_per_token_e4m3 = triton_kernel(_GPU, "norm_quantize_per_token_e4m3")


class Operands(NamedTuple):
    """Rows, what they are multiplied by, and which norm."""

    x: Tensor
    weight: Tensor
    kind: str
    is_per_token: bool


def _named(operands: Operands) -> dict[str, Any]:
    return {"kind": operands.kind, "weight": operands.weight, "value_dtype": operands.x.dtype}


_OUTPUT: dict[str, Any] = {"out_scale": 0.03, "out_zero_point": -5}
_E4M3_OUTPUT: dict[str, Any] = {"out_dtype": torch.float8_e4m3fn, "out_scale": 0.01}


def _call(operands: Operands, tiles: TileConfig | None) -> object:
    if operands.is_per_token:
        return _per_token(operands.x, tiles=tiles, **_named(operands))
    return _static(operands.x, tiles=tiles, **_named(operands), **_OUTPUT)


def _reference(operands: Operands) -> object:
    if operands.is_per_token:
        return reference.norm_quantize_per_token(operands.x, **_named(operands))
    return reference.norm_quantize(operands.x, **_named(operands), **_OUTPUT)


def _call_e4m3(operands: Operands, tiles: TileConfig | None) -> object:
    if operands.is_per_token:
        return _per_token_e4m3(operands.x, tiles=tiles, **_named(operands))
    return _static(operands.x, tiles=tiles, **_named(operands), **_E4M3_OUTPUT)


def _reference_e4m3(operands: Operands) -> object:
    if operands.is_per_token:
        return reference.norm_quantize_per_token_e4m3(operands.x, **_named(operands))
    return reference.norm_quantize(operands.x, **_named(operands), **_E4M3_OUTPUT)


def _make(M: int, K: int, kind: str, *, is_per_token: bool) -> Any:
    def make(device: torch.device, seed: int) -> Operands:
        x, weight = floats((M, K), device, seed), floats((K,), device, seed + 1)
        return Operands(x, weight, kind, is_per_token)

    return make


def _draw(device: torch.device, seed: int) -> Operands:
    M, K = drawn_sizes(seed, 200, 9000)
    kind = ("layer", "rms")[seed % 2]
    made: Operands = _make(M, K, kind, is_per_token=seed % 3 == 2)(device, seed)
    return made


def _bound(operands: Operands) -> Bound:
    """Sums in another order: a result beside a tie may fall to its other side.

    Per token the ends of a row are bfloat16: a last bit is 2**-8 of the scale, two steps of the
    zero point, and with those and its own rounding up to four of an integer.
    """
    return Bound(lsb=4, rtol=2**-7) if operands.is_per_token else Bound(lsb=1)


def _bound_e4m3(operands: Operands) -> Bound:
    """As `_bound`: a last bit of bfloat16 is a sixteenth of the space between two codes."""
    return Bound(lsb=1, rtol=2**-7 if operands.is_per_token else 0.0)


def _layer(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight)


def _rms(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight)


def _case(M: int, K: int, kind: str, *, is_per_token: bool, to: str = "") -> BenchCase[Operands]:
    x, weight = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((M, K), (K,)))
    return BenchCase(
        name=f"{M}x{K} {kind} {'per token' if is_per_token else 'static'}{to}",
        shape_class=columns_class(K),
        make=_make(M, K, kind, is_per_token=is_per_token),
        cost=cost(x, weight, None),
        unit=MathUnit.FLOAT32,
        peers=compiled_peer(lambda o: (o.x, o.weight), _layer if kind == "layer" else _rms),
    )


BENCH = Bench(
    op="norm_quantize",
    call=_call,
    reference=_reference,
    draw=_draw,
    bound=_bound,
    cases=(
        _case(65536, 128, "rms", is_per_token=False),
        _case(4096, 768, "layer", is_per_token=False),
        _case(4096, 4096, "rms", is_per_token=True),
        _case(1, 4096, "rms", is_per_token=True),
        _case(2048, 8192, "rms", is_per_token=True),
    ),
    # A row must fit one tile.
    sweep={
        **ROW_SWEEP,
        "long": tile_grid(num_warps=(8, 16, 32), num_stages=(1,), BLOCK_M=(1,), BLOCK_K=(16384,)),
    },
)

E4M3_BENCH = Bench(
    op="norm_quantize",
    variant=Variant.E4M3,
    call=_call_e4m3,
    reference=_reference_e4m3,
    draw=_draw,
    bound=_bound_e4m3,
    cases=(
        _case(65536, 128, "rms", is_per_token=False, to=" to e4m3"),
        _case(4096, 768, "layer", is_per_token=False, to=" to e4m3"),
        _case(4096, 4096, "rms", is_per_token=True, to=" to e4m3"),
        _case(2048, 8192, "rms", is_per_token=True, to=" to e4m3"),
    ),
    sweep={},
    lowest_capability=FP8_CAPABILITY,
)

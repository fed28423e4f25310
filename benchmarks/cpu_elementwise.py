"""Which integer forms of what is bound by memory, all in torch's CPU build, beat float there?

Run `python -m benchmarks.cpu_elementwise`: CPU time of both in turn, one thread, the least of the
rounds; a class's ratio is the geometric mean over its shapes. Both stand between two integer
operators: the one before writes floats or uint8 at no cost, the one behind wants uint8. Writes
`kernels/<op>/measured/<cpu>.json`.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.cpu_times import means, times_of, write_ratios
from pt2e_quant.backends.cpu.passes.single_pass_qdq import (
    dequantize_once,
    hear_deprecation,
    integers_of,
    quantize_once,
)

__all__ = ["CASES", "Case", "calls", "ratios"]

quantized: Any = torch.ops.quantized
aten: Any = torch.ops.aten
Shapes = tuple[tuple[int, ...], ...]
_IN, _OUT = (0.02, 120), (0.03, 100)
"""Scale and zero point of what goes in and of what comes out."""
_LARGE = 2**17


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator in both forms.

    Args:
        op: the unit's folder.
        name: of the class of sizes.
        shapes: of the operands, for each measurement.
        in_float: of float32 operands.
        in_integers: of torch's quantized operands, or of plain uint8 ones.
        is_plain: whether `in_integers` takes and gives plain uint8.
        keeps_scale: whether its result has its operand's qparams.
    """

    op: str
    name: str
    shapes: tuple[Shapes, ...]
    in_float: Callable[..., Tensor]
    in_integers: Callable[..., Tensor]
    is_plain: bool = False
    keeps_scale: bool = False


def _image(channels: int, side: int) -> tuple[int, ...]:
    return (1, channels, side, side)


def _table(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """A function of uint8 as 256 results, gathered."""
    every = torch.arange(256, dtype=torch.uint8)
    results: list[Tensor] = []

    def gathered(x: Tensor) -> Tensor:
        if not results:
            results.append(
                quantize_once(function(dequantize_once(every, *_IN)), *_OUT, every.dtype)
            )
        rows = x.permute(0, 2, 3, 1) if x.dim() == 4 else x
        found = torch.index_select(results[0], 0, rows.reshape(-1).int()).reshape(rows.shape)
        return found.permute(0, 3, 1, 2) if x.dim() == 4 else found

    return gathered


def _max_pool(x: Tensor) -> Tensor:
    made: Tensor = quantized.max_pool2d(x, [3, 3], [2, 2], [1, 1], [1, 1], False)
    return made


def _average(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 3, 2, 1)


def _global(x: Tensor) -> Tensor:
    return F.adaptive_avg_pool2d(x, 1)


def _joined(*xs: Tensor) -> Tensor:
    return torch.cat(xs, 1)


_SUMS = tuple((shape, shape) for shape in (_image(64, 14), _image(160, 7), _image(24, 56)))
_LARGE_SUMS = tuple((shape, shape) for shape in (_image(1024, 14), _image(512, 28), (197, 1536)))
_GATES = tuple(
    (_image(c, side), _image(c, 1)) for c, side in ((72, 28), (120, 28), (480, 14), (960, 7))
)
_LARGE_GATES = tuple((_image(c, side), _image(c, 1)) for c, side in ((672, 14), (96, 56)))
_MAPS = ((_image(16, 56),), (_image(240, 14),), (_image(64, 112),))

CASES: tuple[Case, ...] = (
    Case(
        op="int8_pool",
        name="global average",
        shapes=tuple((_image(*size),) for size in ((512, 7), (2048, 7), (240, 14), (72, 28))),
        in_float=_global,
        in_integers=_global,
        keeps_scale=True,
    ),
    Case(
        op="int8_pool",
        name="average of a window",
        shapes=tuple((_image(*size),) for size in ((192, 28), (128, 56), (16, 8))),
        in_float=_average,
        in_integers=_average,
        keeps_scale=True,
    ),
    Case(
        op="data_movement",
        name="max_pool2d",
        shapes=tuple((_image(*size),) for size in ((64, 112), (192, 28), (16, 8))),
        in_float=lambda x: F.max_pool2d(x, 3, 2, 1),
        in_integers=_max_pool,
        is_plain=True,
        keeps_scale=True,
    ),
    Case(
        op="data_movement",
        name="cat",
        shapes=tuple((_image(*a), _image(*b)) for a, b in (((64, 56), (64, 56)), ((8, 8), (8, 8)))),
        in_float=_joined,
        in_integers=_joined,
        is_plain=True,
        keeps_scale=True,
    ),
    *(
        Case(
            op="int8_add",
            name=f"{name}, {size}",
            shapes=shapes,
            in_float=in_float,
            in_integers=in_integers,
        )
        for size, shapes in (("< 2^17 elements", _SUMS), (">= 2^17 elements", _LARGE_SUMS))
        for name, in_float, in_integers in (
            ("sum", torch.add, lambda x, y: quantized.add(x, y, *_OUT)),
            ("sum, relu", lambda x, y: F.relu(x + y), lambda x, y: quantized.add_relu(x, y, *_OUT)),
            ("product", torch.mul, lambda x, y: quantized.mul(x, y, *_OUT)),
        )
    ),
    *(
        Case(
            op="int8_add",
            name=f"product by a gate, {size}",
            shapes=shapes,
            in_float=torch.mul,
            in_integers=lambda x, y: quantized.mul(x, y, *_OUT),
        )
        for size, shapes in (("< 2^17 elements", _GATES), (">= 2^17 elements", _LARGE_GATES))
    ),
    *(
        Case(
            op="quantize",
            name=name,
            shapes=_MAPS,
            in_float=in_float,
            in_integers=in_integers,
            is_plain=is_plain,
        )
        for name, in_float, in_integers, is_plain in (
            ("hardswish", F.hardswish, lambda x: quantized.hardswish(x, *_OUT), False),
            ("sigmoid", torch.sigmoid, lambda x: quantized.sigmoid(x, *_OUT), False),
            (
                "leaky_relu",
                F.leaky_relu,
                lambda x: quantized.leaky_relu(x, 0.01, False, *_OUT),
                False,
            ),
            ("hardswish, a table", F.hardswish, _table(F.hardswish), True),
            ("gelu, a table", F.gelu, _table(F.gelu), True),
            ("silu, a table", F.silu, _table(F.silu), True),
        )
    ),
)


def calls(case: Case, shapes: Shapes) -> dict[str, Callable[[], Tensor]]:
    """Both forms on one draw: uint8 out of each, the same up to a step."""
    integers = [_draw(shape) for shape in shapes]
    floats = [dequantize_once(x, *_IN) for x in integers]
    qparams = _IN if case.keeps_scale else _OUT

    def in_integers() -> Tensor:
        if case.is_plain:
            return case.in_integers(*integers)
        held = [aten._make_per_tensor_quantized_tensor(x, *_IN) for x in integers]
        return integers_of(case.in_integers(*held))

    return {
        "float": lambda: quantize_once(case.in_float(*floats), *qparams, torch.uint8),
        "integer": in_integers,
    }


def _draw(shape: tuple[int, ...]) -> Tensor:
    made = torch.randint(0, 256, shape, dtype=torch.uint8)
    return made.to(memory_format=torch.channels_last) if len(shape) == 4 else made


def ratios(rounds: int, cases: tuple[Case, ...] = CASES) -> dict[str, dict[str, float]]:
    """By unit, class of sizes to speed of the integer form over float."""
    found: dict[str, dict[str, list[float]]] = {}
    for case in cases:
        for shapes in case.shapes:
            times = times_of(calls(case, shapes), rounds)
            held = found.setdefault(case.op, {}).setdefault(case.name, [])
            held.append(times["float"] / times["integer"])
    return {op: means(of_op) for op, of_op in found.items()}


def main() -> None:
    """Measure, print, and write unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each shape")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hear_deprecation()
    write_ratios(ratios(options.rounds), is_written=not options.no_write)


if __name__ == "__main__":
    main()

"""Which shape classes of the integer operators beat float32, prepacked or not, on this CPU?

Run `python -m benchmarks.cpu_kernels`: CPU time of both in turn, one thread, the least of the
rounds; a class's ratio is the geometric mean over its shapes. Writes
`kernels/<op>/measured/<cpu>.json`, which the cpu backend places and reports by.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
from torch import Tensor

import pt2e_quant.kernels
from benchmarks.measure import interleave
from pt2e_quant.backends.cpu.single_pass_qdq import hear_deprecation, quantize_once
from pt2e_quant.core.packing import pack
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups
from pt2e_quant.kernels.int4_linear.few_rows_op import UINT4, PackInt4, scales_and_zeros
from pt2e_quant.kernels.int8_conv2d.cpu import class_of
from pt2e_quant.kernels.int8_linear.cpu import class_of as linear_class_of
from pt2e_quant.kernels.onednn.digits_op import LinearOfDigits, digit_shifts, weight_digits
from pt2e_quant.kernels.onednn.digits_site import class_of as weight_only_class_of
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.onednn.speed import cpu_slug

onednn: Any = torch.ops.onednn
mkldnn: Any = torch.ops.mkldnn
Call = Callable[[], Tensor]
_SCALE, _ZERO_POINT = 0.02, 3
_CALLS = 5
"""Calls in one sample: a single one is too short for the clock."""


@dataclass(frozen=True, slots=True)
class Conv:
    """A convolution of one image with "same" padding.

    Args:
        c: channels going in.
        o: channels coming out.
        kernel: its side.
        side: of the image going in.
        groups: of channels.
        stride: in both directions.
    """

    c: int
    o: int
    kernel: int
    side: int
    groups: int = 1
    stride: int = 1

    def class_name(self, *, in_chain: bool) -> str:
        """The registry's class of these sizes."""
        places = (-(-self.side // self.stride)) ** 2
        weight = (self.o, self.c // self.groups, self.kernel, self.kernel)
        return class_of(weight, groups=self.groups, places=places, in_chain=in_chain)


def _depthwise(channels: int, side: int, stride: int = 1) -> Conv:
    return Conv(channels, channels, 3, side, channels, stride)


CONVS = (
    *(Conv(3, 8, 3, 16), Conv(1, 16, 3, 28), Conv(3, 16, 3, 64), Conv(3, 32, 3, 128, 1, 2)),
    *(Conv(3, 64, 7, 224, 1, 2), Conv(3, 32, 3, 224, 1, 2)),
    *(Conv(16, 16, 3, 8), Conv(8, 16, 3, 8), Conv(32, 32, 3, 14), Conv(16, 32, 3, 28)),
    *(Conv(64, 64, 3, 56), Conv(256, 256, 3, 14), Conv(128, 128, 3, 28)),
    *(Conv(8, 16, 1, 8), Conv(32, 64, 1, 8), Conv(64, 64, 1, 16), Conv(96, 24, 1, 28)),
    *(Conv(64, 256, 1, 56), Conv(1024, 256, 1, 14), Conv(256, 128, 1, 28)),
    *(_depthwise(16, 8), _depthwise(96, 14), _depthwise(384, 14), _depthwise(144, 28)),
    *(_depthwise(192, 56), _depthwise(256, 56)),
    *(Conv(16, 16, 3, 8, 4), Conv(32, 32, 3, 8, 8), Conv(64, 64, 3, 14, 8)),
    *(Conv(64, 64, 3, 56, 4), Conv(128, 128, 3, 56, 32)),
)
LINEARS = tuple(
    (rows, n, k)
    for rows in (1, 16, 128, 256)
    for n, k in ((32, 32), (10, 64), (768, 768), (3072, 768))
)
WEIGHT_ONLY = tuple(
    (rows, n, k)
    for rows in (1, 4, 16, 64, 256)
    for n, k in ((384, 384), (768, 768), (1536, 384), (1024, 1024), (3072, 768), (4096, 1024))
)
_GROUP = 32


def conv_calls(conv: Conv) -> dict[str, Call]:
    """The float and the int8 convolution with a relu; in a chain, the float one quantizes."""
    x = torch.randn(1, conv.c, conv.side, conv.side).to(memory_format=torch.channels_last)
    weight = torch.randn(conv.o, conv.c // conv.groups, conv.kernel, conv.kernel)
    pad, stride, dilation = [conv.kernel // 2] * 2, [conv.stride] * 2, [1, 1]
    geometry = (stride, pad, dilation, conv.groups)
    bias, scales = torch.randn(conv.o), torch.full((conv.o,), 0.01)
    zeros = torch.zeros(conv.o, dtype=torch.int32)
    packed = mkldnn._reorder_convolution_weight(
        weight, pad, stride, dilation, conv.groups, list(x.shape)
    )
    x_q = torch.randint(0, 256, x.shape, dtype=torch.uint8).to(memory_format=torch.channels_last)
    weight_q = torch.randint(-127, 128, weight.shape, dtype=torch.int8)
    packed_q = onednn.qconv_prepack(weight_q, scales, _SCALE, _ZERO_POINT, *geometry, list(x.shape))
    post_op = ("relu", [], "")

    def in_float() -> Tensor:
        args = (x, packed, bias, pad, stride, dilation, conv.groups, *post_op)
        made: Tensor = mkldnn._convolution_pointwise(*args)
        return made

    def unpacked() -> Tensor:
        # For images of few pixels and one thread torch has a faster one than oneDNN's.
        return torch.relu(torch.conv2d(x, weight, bias, stride, pad, dilation, conv.groups))

    def in_integers() -> Tensor:
        head = (x_q, _SCALE, _ZERO_POINT, packed_q, scales, zeros, bias, *geometry)
        made: Tensor = onednn.qconv_pointwise(*head, 0.05, 0, torch.uint8, *post_op)
        return made

    def between_integers() -> Tensor:
        # The convolution before gives float at no cost; the one behind wants integers.
        return quantize_once(in_float(), 0.05, 0, torch.uint8)

    return {
        "float": in_float,
        "unpacked": unpacked,
        "int8": in_integers,
        "chain": between_integers,
        "unpacked chain": lambda: quantize_once(unpacked(), 0.05, 0, torch.uint8),
    }


def linear_calls(rows: int, n: int, k: int) -> dict[str, Call]:
    """The float and the int8 linear, both with float results."""
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    packed = mkldnn._reorder_linear_weight(weight, rows)
    x_q = torch.randint(0, 256, (rows, k), dtype=torch.uint8)
    weight_q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    packed_q = onednn.qlinear_prepack(weight_q, [rows, k])
    scales, zeros = torch.full((n,), 0.01), torch.zeros(n, dtype=torch.int32)
    head = (x_q, _SCALE, _ZERO_POINT, packed_q, scales, zeros, bias)
    end = (1.0, 0, torch.float32, "none", [], "")
    return {
        "float": lambda: mkldnn._linear_pointwise(x, packed, bias, "none", [], ""),
        "int8": lambda: onednn.qlinear_pointwise(*head, *end),
    }


def weight_only_calls(rows: int, n: int, k: int) -> dict[str, Call]:
    """The float linear, one on int8 rows, and one on 4-bit groups, all of and to float."""
    x, weight, bias = torch.randn(rows, k), torch.randn(n, k), torch.randn(n)
    plain = mkldnn._reorder_linear_weight(weight, rows)
    high, low, scale = weight_digits(weight)
    zeros, shifts = torch.zeros(n, dtype=torch.int32), digit_shifts(2)
    packed = [PackLinear(digit, None) for digit in (high, low)]
    first = (x, packed[0], scale, zeros, shifts)
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    scales = scales_and_zeros(torch.rand(n, k // _GROUP), None)
    few = PackInt4(pack(codes, UINT4))

    def on_groups() -> Tensor:
        made: Tensor = LinearOfGroups(x, few, _GROUP, scales, n, *first[1:], packed[1], scale, bias)
        return made

    return {
        "float": lambda: mkldnn._linear_pointwise(x, plain, bias, "none", [], ""),
        "rows": lambda: LinearOfDigits(*first, None, None, bias),
        "groups": on_groups,
    }


def _repeat(call: Call) -> Callable[[], None]:
    def run() -> None:
        for _ in range(_CALLS):
            call()

    return run


def times_of(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """The least CPU time of each call, in milliseconds for `_CALLS` of them."""
    repeated = {name: _repeat(call) for name, call in calls.items()}
    found = interleave(repeated, rounds=rounds, clock=time.process_time)
    return {name: latency.min_ms for name, latency in found.items()}


def means(found: dict[str, list[float]]) -> dict[str, float]:
    """The geometric mean of each class's ratios."""
    return {name: round(geometric_mean(ratios), 2) for name, ratios in sorted(found.items())}


def conv_ratios(rounds: int, convs: tuple[Conv, ...] = CONVS) -> dict[str, float]:
    """Shape class to speed of int8 over float, alone and in a chain."""
    found: dict[str, list[float]] = {}
    for conv in convs:
        times = times_of(conv_calls(conv), rounds)
        alone, chain = (conv.class_name(in_chain=given) for given in (False, True))
        best, best_in_chain = (
            min(times[name], times[f"unpacked {name}".removesuffix(" float")])
            for name in ("float", "chain")
        )
        found.setdefault(alone, []).append(best / times["int8"])
        found.setdefault(chain, []).append(best_in_chain / times["int8"])
    return means(found)


def linear_ratios(
    rounds: int, linears: tuple[tuple[int, int, int], ...] = LINEARS
) -> dict[str, float]:
    """Shape class to speed of int8 over float."""
    found: dict[str, list[float]] = {}
    for rows, n, k in linears:
        times = times_of(linear_calls(rows, n, k), rounds)
        found.setdefault(linear_class_of(rows, n * k), []).append(times["float"] / times["int8"])
    return means(found)


def weight_only_ratios(
    rounds: int, linears: tuple[tuple[int, int, int], ...] = WEIGHT_ONLY
) -> dict[str, dict[str, float]]:
    """Shape class to speed of integer weights over float, by how the weight is scaled.

    Where rows are known at run time only, a weight is as fast as with the worst number of them.
    """
    found: dict[str, dict[str, list[float]]] = {"rows": {}, "groups": {}}
    by_weight: dict[str, dict[str, set[str]]] = {"rows": {}, "groups": {}}
    for rows, n, k in linears:
        times = times_of(weight_only_calls(rows, n, k), rounds)
        for form, ratios in found.items():
            name, of_any = (weight_only_class_of(form, m, n * k) for m in (rows, None))
            ratios.setdefault(name, []).append(times["float"] / times[form])
            by_weight[form].setdefault(of_any, set()).add(name)
    made = {form: means(ratios) for form, ratios in found.items()}
    for form, classes in by_weight.items():
        made[form] |= {name: min(made[form][one] for one in ones) for name, ones in classes.items()}
    return made


def main() -> None:
    """Measure, print, and write unless told not to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=50, help="timed rounds of each shape")
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hear_deprecation()
    weight_only = weight_only_ratios(options.rounds)
    results = {
        "int8_conv2d": conv_ratios(options.rounds),
        "int8_linear": linear_ratios(options.rounds) | weight_only["rows"],
        "int4_linear": weight_only["rows"] | weight_only["groups"],
    }
    write_ratios(results, is_written=not options.no_write)


def write_ratios(results: dict[str, dict[str, float]], *, is_written: bool) -> None:
    """Print each unit's ratios, and write them to its file for CPUs like this one."""
    for op, ratios in results.items():
        text = json.dumps(ratios, indent=2) + "\n"
        print(op, cpu_slug(), text)
        if is_written:
            file = Path(pt2e_quant.kernels.__path__[0], op, "measured", f"{cpu_slug()}.json")
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)


if __name__ == "__main__":
    main()

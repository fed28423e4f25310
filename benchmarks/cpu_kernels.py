"""Which shape classes of the integer operators beat prepacked float32 on this CPU?

Run `python -m benchmarks.cpu_kernels`: CPU time of both in turn, one thread, the least of the
rounds; a class's ratio is the geometric mean over its shapes. Writes
`kernels/<op>/measured/<cpu>.json`, which the cpu backend places and reports by.
"""

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.cpu_linears import dynamic_ratios, linear_ratios, weight_only_ratios
from benchmarks.cpu_times import Call, means, times_of, write_ratios
from pt2e_quant.backends.cpu.passes.single_pass_qdq import hear_deprecation, quantize_once
from pt2e_quant.kernels.int8_conv2d.cpu import class_of

onednn: Any = torch.ops.onednn
mkldnn: Any = torch.ops.mkldnn
_SCALE, _ZERO_POINT = 0.02, 3


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

    def in_integers() -> Tensor:
        head = (x_q, _SCALE, _ZERO_POINT, packed_q, scales, zeros, bias, *geometry)
        made: Tensor = onednn.qconv_pointwise(*head, 0.05, 0, torch.uint8, *post_op)
        return made

    def between_integers() -> Tensor:
        # The convolution before gives float at no cost; the one behind wants integers.
        return quantize_once(in_float(), 0.05, 0, torch.uint8)

    return {"float": in_float, "int8": in_integers, "chain": between_integers}


def conv_ratios(rounds: int, convs: tuple[Conv, ...] = CONVS) -> dict[str, float]:
    """Shape class to speed of int8 over float, alone and in a chain."""
    found: dict[str, list[float]] = {}
    for conv in convs:
        times = times_of(conv_calls(conv), rounds)
        alone, chain = (conv.class_name(in_chain=given) for given in (False, True))
        found.setdefault(alone, []).append(times["float"] / times["int8"])
        found.setdefault(chain, []).append(times["chain"] / times["int8"])
    return means(found)


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
        "int8_linear": linear_ratios(options.rounds)
        | dynamic_ratios(options.rounds)
        | weight_only["rows"],
        "int4_linear": weight_only["rows"] | weight_only["groups"],
    }
    write_ratios(results, is_written=not options.no_write)


if __name__ == "__main__":
    main()

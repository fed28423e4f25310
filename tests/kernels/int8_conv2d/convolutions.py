"""Convolutions, drawn: every form of the kernel, extreme integers and zero points."""

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from pt2e_quant.kernels.int8_conv2d.pack import pack_weight, window_sums
from tests.kernels.operands import integers, scales

__all__ = ["Drawn", "conv_operands", "convolutions", "made_of"]


class Drawn(NamedTuple):
    batch: int
    channels: int
    outputs: int
    image: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    @property
    def weight_shape(self):
        return (self.outputs, self.channels // self.groups, *self.kernel)

    @property
    def window(self):
        return self.stride, self.padding, self.dilation, self.groups


def pairs(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@st.composite
def convolutions(draw, most_channels=70):
    """Sizes of a convolution whose window fits in its padded image at least once."""
    form = draw(st.sampled_from(["any", "grouped", "depthwise", "pointwise"]))
    kernel, stride, padding, dilation = (draw(pairs(*bounds)) for bounds in BOUNDS)
    if form == "pointwise":
        kernel, stride, padding = (1, 1), (1, 1), (0, 0)
    groups, depth = 1, draw(st.sampled_from([1, 3, 5, 33, most_channels]))
    if form == "grouped":
        groups, depth = draw(st.integers(2, 3)), draw(st.sampled_from([2, 4, 7]))
    elif form == "depthwise":
        groups, depth = draw(st.integers(2, 20)), 1
    outputs = groups * draw(st.integers(1, 3 if form == "depthwise" else 9))
    least = [
        max(1, d * (k - 1) + 1 - 2 * p) for k, p, d in zip(kernel, padding, dilation, strict=True)
    ]
    image = tuple(size + draw(st.integers(0, 5)) for size in least)
    batch = draw(st.integers(1, 2))
    return Drawn(batch, depth * groups, outputs, image, kernel, stride, padding, dilation, groups)


BOUNDS = ((1, 4), (1, 3), (0, 3), (1, 2))
"""Of kernel, stride, padding and dilation."""


@st.composite
def conv_operands(draw, drawn):
    """The arguments of int8_conv2d before its epilogue."""
    weight = draw(integers(drawn.weight_shape))
    x = draw(integers((drawn.batch, drawn.channels, *drawn.image)))
    return (
        x.contiguous(memory_format=torch.channels_last),
        draw(scales(1, 0.05)),
        draw(integers((1,), dtype=torch.int32)),
        pack_weight(weight, drawn.groups),
        draw(scales(drawn.outputs, 0.01)),
        window_sums(weight),
        *drawn.window,
    )


def made_of(drawn, *, zero_point):
    """The same from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    shape = (drawn.batch, drawn.channels, *drawn.image)
    x = torch.randint(-128, 128, shape, dtype=torch.int8, generator=generator)
    weight = torch.randint(-128, 128, drawn.weight_shape, dtype=torch.int8, generator=generator)
    return (
        x.contiguous(memory_format=torch.channels_last),
        torch.tensor([0.02]),
        torch.tensor([zero_point], dtype=torch.int32),
        pack_weight(weight, drawn.groups),
        torch.rand(drawn.outputs, generator=generator) * 0.01,
        window_sums(weight),
        *drawn.window,
    )

"""Operators of a runtime at sizes of every class, to be timed."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from pt2e_quant.backends.target.speed_classes import (
    conv_class,
    conv_sizes,
    light_class,
    linear_class,
    transposed_class,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One operator and its sizes.

    Args:
        name: its class.
        op: of ONNX.
        x: sizes of what it reads.
        weight: sizes of its weight; none: it has no weight.
        gate: sizes of its other operand, which is computed too.
        attributes: of the operator.
        is_chained: whether it can read its own result.
        gives_float: whether its result stays float.
        amount: of its work, as `speed_classes.work_of` counts.
        kind: of its work, likewise.
        sizes: likewise.
        is_pair: whether one back to as many channels follows, as only then it can be chained.
    """

    name: str
    op: str
    x: tuple[int, ...]
    weight: tuple[int, ...] = ()
    gate: tuple[int, ...] = ()
    attributes: tuple[tuple[str, Any], ...] = ()
    is_chained: bool = True
    gives_float: bool = False
    amount: int
    kind: str
    sizes: tuple[int, ...]
    is_pair: bool = False


def _conv(channels: int, size: tuple[int, ...], kernel: tuple[int, ...], groups: int = 1) -> Case:
    weight = (channels, channels // groups, *kernel)
    pads = [k // 2 for k in kernel] + [(k - 1) // 2 for k in kernel]
    positions = int(np.prod(size))
    return Case(
        name=conv_class(groups=groups, weight=weight, positions=positions),
        op="Conv",
        x=(1, channels, *size),
        weight=weight,
        attributes=(("group", groups), ("pads", pads)),
        **_work(groups, weight, positions),
    )


def _work(groups: int, weight: tuple[int, ...], positions: int) -> dict[str, Any]:
    kind, sizes = conv_sizes(groups=groups, weight=weight, positions=positions)
    return {"kind": kind, "sizes": sizes, "amount": positions * int(np.prod(weight))}


def _pair(inputs: int, results: int, side: int, edge: int) -> Case:
    """A convolution to another number of channels, and one back."""
    weight = (results, inputs, edge, edge)
    return Case(
        name=conv_class(groups=1, weight=weight, positions=side * side),
        op="Conv",
        x=(1, inputs, side, side),
        weight=weight,
        attributes=(("group", 1), ("pads", [edge // 2] * 4)),
        is_pair=True,
        **_work(1, weight, side * side),
    )


def _stem(
    channels: int, results: int, size: tuple[int, int], kernel: tuple[int, int], stride: int
) -> Case:
    """A convolution of few channels, which cannot read its own result."""
    weight = (results, channels, *kernel)
    pads = [k // 2 for k in kernel] + [(k - 1) // 2 for k in kernel]
    strides = [stride if edge > 1 else 1 for edge in size]
    positions = int(np.prod([-(-edge // step) for edge, step in zip(size, strides, strict=True)]))
    return Case(
        name=conv_class(groups=1, weight=weight, positions=positions),
        op="Conv",
        x=(1, channels, *size),
        weight=weight,
        attributes=(("strides", strides), ("pads", pads)),
        is_chained=False,
        **_work(1, weight, positions),
    )


def _transposed(inputs: int, results: int, side: int, kernel: int, groups: int = 1) -> Case:
    """A transposed convolution of stride 2 that doubles its image."""
    weight = (inputs, results // groups, kernel, kernel)
    name = transposed_class(groups=groups, weight=weight, stride=(2, 2), positions=side * side)
    pads = [(kernel - 1) // 2] * 4
    attributes = (("strides", [2, 2]), ("pads", pads), ("output_padding", [kernel % 2] * 2))
    return Case(
        name=name,
        op="ConvTranspose",
        x=(1, inputs, side, side),
        weight=weight,
        attributes=(*attributes, ("group", groups)),
        is_chained=False,
        amount=inputs * side * side * int(np.prod(weight[1:])),
        kind="conv_transpose",
        sizes=(inputs, results, kernel * kernel, side * side),
    )


def _linear(rows: int, width: int) -> Case:
    name = linear_class(rows=rows, weight=(width, width))
    sizes, weight = (rows, width), (width, width)
    return Case(
        name=name,
        op="MatMul",
        x=sizes,
        weight=weight,
        is_chained=False,
        gives_float=True,
        amount=rows * width * width,
        kind="linear",
        sizes=(rows, width, width),
    )


def _shuffle(channels: int, side: int) -> Case:
    """A shuffle of two halves of the channels, behind a convolution (Zhang et al. 2017)."""
    conv = _conv(channels, (side, side), (1, 1))
    elements = channels * side * side
    return replace(conv, op="Shuffle", kind="shuffle", sizes=(elements,), amount=elements)


def _light(name: str, op: str, x: tuple[int, ...], gate: tuple[int, ...] = (), **more: Any) -> Case:
    is_chained = more.pop("is_chained", True)
    is_gate = bool(gate) and gate != x
    elements = int(np.prod(x))
    return Case(
        name=light_class(name, elements=elements, is_gate=is_gate),
        op=op,
        x=x,
        gate=gate,
        attributes=tuple(more.items()),
        is_chained=is_chained,
        amount=elements,
        kind=f"{name} by a gate" if is_gate else name,
        sizes=(elements,),
    )


_SIDES = (8, 28, 64)
_IMAGES = ((1, 16, 14, 14), (1, 32, 28, 28), (1, 96, 56, 56))
_POOL = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}


def _images() -> Iterator[Case]:
    for side in _SIDES:
        for channels in (16, 64):
            for kernel in ((1, 1), (3, 3)):
                yield _conv(channels, (side, side), kernel)
        for kernel in ((1, 1), (5, 5)):
            yield _conv(32, (side, side), kernel)
        for kernel in ((1, 1), (3, 3), (5, 5)):
            yield _conv(8, (side, side), kernel)
        for kernel in ((5, 5), (7, 7)):
            yield _conv(16, (side, side), kernel)
        for kernel in ((1, 1), (3, 3), (5, 5), (7, 7)):
            yield _conv(64, (side, side), kernel, groups=64)
        yield _conv(64, (side, side), (3, 3), groups=4)
        yield _conv(64, (side, side), (1, 1), groups=4)
        for (channels, groups), edge in product(((16, 4), (32, 4), (64, 8)), (3, 1)):
            yield _conv(channels, (side, side), (edge, edge), groups=groups)


def _widening() -> Iterator[Case]:
    """Convolutions to more channels and back, as in bottlenecks and inverted residuals."""
    for side, edge in product((7, 14, 28, 56), (1, 3)):
        for inputs, results in ((16, 64), (24, 144), (64, 256), (128, 512)):
            if inputs * results * edge * side < 2**22:
                yield _pair(inputs, results, side, edge)
    # Results larger than a core's cache.
    for inputs, results in ((16, 32), (16, 96), (32, 96)):
        yield _pair(inputs, results, 112, 1)
    for channels in (32, 96):
        yield _conv(channels, (112, 112), (3, 3), groups=channels)
    yield _conv(32, (112, 112), (3, 3))
    for side in (7, 14, 28):
        for channels in (128, 256):
            yield _conv(channels, (side, side), (1, 1))
            yield _conv(channels, (side, side), (3, 3))
    for side, results in product((32, 64, 224), (16, 32, 64)):
        yield _stem(3, results, (side, side), (3, 3), 2)
    yield _stem(3, 64, (224, 224), (7, 7), 2)
    yield _stem(3, 64, (64, 64), (8, 8), 8)
    for channels, side in ((32, 8), (32, 32), (64, 16), (64, 56)):
        yield _shuffle(channels, side)
    for side in (7, 14, 56):
        yield _conv(256, (side, side), (3, 3), groups=256)
        yield _conv(32, (side, side), (3, 3), groups=32)


def _cases() -> Iterator[Case]:
    yield from _images()
    yield from _widening()
    for positions in (32, 512, 4096):
        yield _conv(8, (positions, 1), (64, 1))
        yield _conv(64, (positions, 1), (64, 1))
        yield _conv(64, (positions, 1), (31, 1), groups=64)
    yield _conv(8, (512, 1), (512, 1))
    yield _stem(1, 64, (1024, 1), (512, 1), 4)
    yield _stem(1, 16, (1024, 1), (64, 1), 4)
    yield _stem(1, 16, (1024, 1), (64, 1), 1)
    for side in (16, 64, 160):
        yield _stem(3, 16, (side, side), (3, 3), 2)
        yield _stem(3, 32, (side, side), (7, 7), 2)
        yield _stem(1, 16, (side, side), (3, 3), 1)
    yield from _upsampling()
    for rows in (1, 8, 128):
        for width in (64, 256, 768):
            yield _linear(rows, width)
    for x in _IMAGES:
        gate = (*x[:2], 1, 1)
        for name, op in (("add", "Add"), ("mul", "Mul")):
            yield _light(name, op, x, x)
            yield _light(name, op, x, gate)
        yield _light("sigmoid", "Sigmoid", x)
        yield _light("leaky_relu", "LeakyRelu", x, alpha=0.1)
        yield _light("avg_pool2d", "AveragePool", x, **_POOL)
        yield _light("max_pool2d", "MaxPool", x, **_POOL)
        yield _light("softmax", "Softmax", (x[2] * x[1] // 8, x[2] * 8), axis=-1)
        yield _light("mean", "GlobalAveragePool", x, is_chained=False)


def _upsampling() -> Iterator[Case]:
    widths = ((16, 32), (16, 16), (32, 16), (64, 32), (96, 64), (128, 64))
    for side in (8, 24, 64):
        for kernel in (2, 3, 4):
            for inputs, results in (*widths, (16, 3), (64, 3), (128, 3)):
                yield _transposed(inputs, results, side, kernel)
        for kernel in (2, 4):
            yield _transposed(64, 64, side, kernel, groups=64)
            yield _transposed(64, 64, side, kernel, groups=4)


CASES = tuple(_cases())

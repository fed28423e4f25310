"""Single operators with drawn geometry: sizes, strides, paddings, groups, shapes that broadcast.

A runtime is held against exact integers on them (`benchmarks.parity`). Where it need not be equal,
`reason_of` says why; it is within a step there.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

Shapes = Sequence[tuple[int, ...]]
Part = tuple[nn.Module, Shapes]
"""An operator, and the shapes of its inputs."""


class Call(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the function gives."""
        return self.function(*inputs)


def _convolution(rand: random.Random, *, is_depthwise: bool) -> Part:
    groups = rand.choice([1, 1, 1, 2, 3])
    inner, outer = groups * rand.randint(1, 6), groups * rand.randint(1, 6)
    if is_depthwise:
        groups = inner = rand.randint(2, 12)
        outer = inner * rand.choice([1, 1, 1, 2])
    conv = nn.Conv2d(
        inner,
        outer,
        (rand.randint(1, 4), rand.randint(1, 4)),
        stride=rand.choice([1, 1, 2, 3]),
        padding=(rand.randint(0, 2), rand.randint(0, 2)),
        dilation=rand.choice([1, 1, 2]),
        groups=groups,
        bias=rand.random() < 0.8,
    )
    behind: list[nn.Module] = rand.choice([[], [], [nn.ReLU()], [nn.ReLU6()]])
    shape = rand.randint(1, 2), inner, rand.randint(7, 11), rand.randint(7, 11)
    return nn.Sequential(conv, *behind), [shape]


def _linear(rand: random.Random) -> Part:
    inner = rand.randint(1, 200)
    rows = rand.choice([(rand.randint(1, 8),), (2, rand.randint(1, 5))])
    return nn.Linear(inner, rand.randint(1, 40), bias=rand.random() < 0.8), [(*rows, inner)]


def _pair(rand: random.Random, function: Callable[..., Tensor]) -> Part:
    c, h, w = rand.randint(1, 8), rand.randint(2, 9), rand.randint(2, 9)
    whole, gate = (1, c, h, w), (1, c, 1, 1)
    same = [(whole, whole)] * 3
    others: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
        (whole, gate),
        (gate, whole),
        (whole, (w,)),
        ((h, w), whole),
        (whole, (1,)),
        ((1, c, h, 1), (1, 1, 1, w)),
    ]
    return Call(function), rand.choice([*same, *others])


def _window(rand: random.Random) -> tuple[tuple[int, int], tuple[int, int], int, bool]:
    """Size, padding, stride and ceil_mode of a pool."""
    size = rand.choice([(2, 1), (1, 2), (2, 2), (3, 2), (3, 3), (1, 3)])
    padding = rand.randint(0, size[0] // 2), rand.randint(0, size[1] // 2)
    return size, padding, rand.choice([1, 2, 3]), rand.random() < 0.3


def _image(rand: random.Random) -> tuple[int, ...]:
    return 1, rand.randint(1, 6), rand.randint(6, 9), rand.randint(6, 9)


def _max_pool(rand: random.Random) -> Part:
    size, padding, stride, is_ceil = _window(rand)
    pool = nn.MaxPool2d(size, stride, padding, rand.choice([1, 1, 2]), ceil_mode=is_ceil)
    return pool, [_image(rand)]


def _average_pool(rand: random.Random) -> Part:
    size, padding, stride, is_ceil = _window(rand)
    counts = rand.random() < 0.7
    return nn.AvgPool2d(size, stride, padding, is_ceil, counts), [_image(rand)]


_FUNCTIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.Sigmoid,
    nn.Tanh,
    nn.Hardswish,
    nn.GELU,
    nn.ELU,
    nn.SiLU,
    nn.Hardsigmoid,
    nn.LeakyReLU,
)


def _function(rand: random.Random) -> Part:
    return rand.choice(_FUNCTIONS)(), [(rand.randint(1, 8), rand.randint(10, 60))]


DRAWN: dict[str, Callable[[random.Random], Part]] = {
    "conv2d": partial(_convolution, is_depthwise=False),
    "depthwise conv2d": partial(_convolution, is_depthwise=True),
    "linear": _linear,
    "add": partial(_pair, function=torch.add),
    "sub": partial(_pair, function=torch.sub),
    "mul": partial(_pair, function=torch.mul),
    "max_pool2d": _max_pool,
    "avg_pool2d": _average_pool,
    "tables": _function,
}
"""What draws an operator."""


def draw(name: str, seed: int, cases: int) -> list[Part]:
    """Operators of one kind whose results hold so many values together."""
    rand = random.Random(seed)
    torch.manual_seed(seed)
    found: list[Part] = []
    while cases > 0:
        part, shapes = DRAWN[name](rand)
        found.append((part, shapes))
        with torch.no_grad():
            cases -= part(*(torch.zeros(shape) for shape in shapes)).numel()
    return found


_FLOAT = "computed in float between a dequantize and a quantize"
_REASONS = {
    "xnnpack": (
        (nn.LeakyReLU, "multiplied by the slope over the scales' ratio in 8 fractional bits"),
        ((nn.ELU, nn.SiLU, nn.GELU, nn.Hardsigmoid, nn.Hardswish, nn.Tanh), _FLOAT),
    ),
    "onnx": (
        ((nn.AvgPool2d, *(type(make()) for make in _FUNCTIONS if make is not nn.Sigmoid)), _FLOAT),
    ),
}


def reason_of(drawn: Part, backend: str) -> str | None:
    """Why a runtime may be a step from the integers of an operator; None where it is equal."""
    part, shapes = drawn
    if isinstance(part, nn.Linear) and backend == "onnx":
        has_rows = len(shapes[0]) == 2 or part.bias is None
        return None if has_rows else "the bias is added in float where rows have two dimensions"
    if isinstance(part, nn.AvgPool2d) and backend == "xnnpack":
        is_whole = not part.ceil_mode and (part.count_include_pad or part.padding == (0, 0))
        return None if is_whole else _FLOAT
    for kinds, reason in _REASONS[backend]:
        if isinstance(part, kinds):
            return reason
    return None

"""Measured speed of a runtime's integer operators against float, by class of sizes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.ops import argument, is_call
from pt2e_quant.kernels.measured import read_ratios
from pt2e_quant.kernels.onednn.speed import measured_cpu
from pt2e_quant.kernels.shape_classes import expected_sizes

CONVS = (*ops.CONV1D, *ops.CONV2D, *ops.CONV3D)
_LONG = 16
"""A kernel with an edge so long or longer is a class of its own."""
_BY_GATE = " by a gate"
_FORMS = {1: "1", **dict.fromkeys(range(2, 10), "<= 9")}
"""Classes of a kernel's area."""


LEAST_LEFT = 2**12
"""Results of fewer elements stay integers: none of the measured nets was faster for leaving one."""
IN_CACHE = 2**18
"""Floats of that many elements fill half of a core's cache; most results that were timed do not."""


def ratio_here(node: Node, backend: str) -> float | None:
    """Speed over float of an operator between two integer ones, on the CPU most like this one.

    The float form has a dequantize before it and a quantize behind it. None: not measured.

    Args:
        node: of a float graph, or of one with q/dq.
        backend: the name of its folder, whose `measured/<cpu>.json` a benchmark wrote.
    """
    name = shape_class(node)
    if name is None:
        return None
    package, path = f"pt2e_quant.backends.{backend}", "measured/{cpu}.json"
    return read_ratios(package, path.format(cpu=measured_cpu(package, path))).get(name)


def conv_class(*, groups: int, weight: Sequence[int], positions: int) -> str:
    """The class of a convolution.

    Args:
        groups: of its channels.
        weight: sizes of its weight: results, inputs of a group, then the kernel's.
        positions: of its result, without channels and batch.
    """
    results, inputs, *kernel = weight
    if groups == 1:
        kind = f"{_size(inputs, (4, 32))} channels"
    else:
        is_depthwise = inputs == 1 and results == groups
        kind = "depthwise" if is_depthwise else f"grouped, {_size(inputs, (16,))} channels"
    area = math.prod(kernel)
    form = "long" if max(kernel) >= _LONG else _FORMS.get(area, "wide")
    return f"conv, {kind}, kernel {form}, {_size(positions, (256, 4096))} positions"


def transposed_class(
    *, groups: int, weight: Sequence[int], stride: Sequence[int], positions: int
) -> str:
    """The class of a transposed convolution.

    Args:
        groups: of its channels.
        weight: sizes of its weight: inputs, results of a group, then the kernel's.
        stride: of each axis.
        positions: of its input, without channels and batch.
    """
    inputs, results, *kernel = weight
    kind = f"{_size(inputs, (32, 128))} channels" if groups == 1 else "grouped"
    is_apart = all(k <= s for k, s in zip(kernel, stride, strict=True))
    windows = "apart" if is_apart else "overlapping"
    sizes = f"{_size(positions, (256, 4096))} positions"
    made = f"{_size(results * groups, (16,))} results"
    return f"conv_transpose, {kind}, {made}, windows {windows}, {sizes}"


def linear_class(*, rows: int, weight: Sequence[int]) -> str:
    """The class of a product with a weight of two dimensions."""
    elements = _size(math.prod(weight), (2**14, 2**18))
    return f"linear, {_size(rows, (2, 16))} rows, {elements} weights"


def light_class(name: str, *, elements: int, is_gate: bool = False) -> str:
    """The class of an operator without a weight.

    Args:
        name: of the operator.
        elements: of its largest operand.
        is_gate: whether one operand is spread over the other.
    """
    by_gate = _BY_GATE if is_gate else ""
    return f"{name}{by_gate}, {_size(elements, (2**12, 2**16))} elements"


@dataclass(frozen=True, slots=True)
class Work:
    """What an operator computes, as far as its time goes.

    Args:
        kind: operators of other kinds tell nothing about its time.
        sizes: numbers by which operators of a kind are alike: channels, kernel, positions.
        amount: multiplications of a product, elements of the largest operand of others.
    """

    kind: str
    sizes: tuple[int, ...]
    amount: int


def conv_sizes(
    *, groups: int, weight: Sequence[int], positions: int
) -> tuple[str, tuple[int, ...]]:
    """Kind and sizes of a convolution's work; arguments are those of `conv_class`."""
    results, inputs, *kernel = weight
    if groups > 1 and inputs == 1 and results == groups:
        return "depthwise", (results, math.prod(kernel), positions)
    kind = "conv" if groups == 1 else "grouped"
    return kind, (inputs, results, math.prod(kernel), positions)


def shape_class(node: Node) -> str | None:
    """The class of an operator of a float graph, symbolic sizes as in the example inputs.

    None if it was not measured, or if a size is known of no example.
    """
    found = _shapes(node)
    if found is None:
        return None
    read, made = found
    if is_call(node, CONVS):
        positions, groups = math.prod(made[2:]), argument(node, "groups")
        return conv_class(groups=groups, weight=read[1], positions=positions)
    if is_call(node, ops.CONV_TRANSPOSE):
        return transposed_class(
            groups=argument(node, "groups"),
            weight=read[1],
            stride=ops.each_axis(argument(node, "stride"), len(read[1]) - 2),
            positions=math.prod(read[0][2:]),
        )
    if is_call(node, ops.LINEAR):
        return linear_class(rows=math.prod(read[0][:-1]), weight=read[1])
    light = _light_work(node, read)
    if light is None:
        return None
    name = light.kind.removesuffix(_BY_GATE)
    return light_class(name, elements=light.amount, is_gate=light.kind != name)


def work_of(node: Node) -> Work | None:
    """The work of an operator, symbolic sizes as in the example inputs; None as `shape_class`."""
    found = _shapes(node)
    if found is None:
        return None
    read, made = found
    if is_call(node, CONVS):
        groups = argument(node, "groups")
        how = conv_sizes(groups=groups, weight=read[1], positions=math.prod(made[2:]))
        return Work(*how, math.prod(made) * math.prod(read[1][1:]))
    if is_call(node, ops.LINEAR):
        rows = math.prod(read[0][:-1])
        return Work("linear", (rows, *read[1][::-1]), rows * math.prod(read[1]))
    return _light_work(node, read)


def _light_work(node: Node, read: Sequence[tuple[int, ...]]) -> Work | None:
    light = next((name for overloads, name in _LIGHT if is_call(node, overloads)), None)
    if light is None:
        return None
    elements = [math.prod(shape) for shape in read]
    is_gate = light in ("add", "mul") and len(set(elements)) > 1
    return Work(light + _BY_GATE * is_gate, (max(elements),), max(elements))


def _shapes(node: Node) -> tuple[list[tuple[int, ...]], tuple[int, ...]] | None:
    """The sizes of what an operator reads and of its result; None if some are not known."""
    found = [shape for read in node.all_input_nodes[:2] if (shape := _shape(read)) is not None]
    made = _shape(node) if node.op == "call_function" else None
    if made is None or not found or len(found) < len(node.all_input_nodes[:2]):
        return None
    return found, made


_LIGHT: tuple[tuple[ops.Overloads, str], ...] = (
    (ops.ADD, "add"),
    (ops.MUL, "mul"),
    (ops.SIGMOID, "sigmoid"),
    (ops.SOFTMAX, "softmax"),
    (ops.LEAKY_RELU, "leaky_relu"),
    (ops.AVG_POOL2D, "avg_pool2d"),
    (ops.MEAN, "mean"),
    (ops.ADAPTIVE_AVG_POOL2D, "mean"),
)


def _shape(node: Node) -> tuple[int, ...] | None:
    """Sizes of a value; None for what is no tensor, is empty, or has a size that is not known."""
    held = node.meta.get("val")
    sizes = expected_sizes(held.shape) if isinstance(held, Tensor) else None
    return None if sizes is None or 0 in sizes else sizes


def _size(number: int, limits: Sequence[int]) -> str:
    above = next((limit for limit in limits if number < limit), None)
    return f">= {limits[-1]}" if above is None else f"< {above}"

"""How fast ONNX Runtime's integer operators measured against float, by class of sizes."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.ops import argument, is_call
from pt2e_quant.kernels.measured import read_ratios
from pt2e_quant.kernels.onednn.speed import cpu_slug
from pt2e_quant.kernels.shape_classes import static_product

_CONVS = (*ops.CONV1D, *ops.CONV2D, *ops.CONV3D)
_LONG = 16
"""A kernel with an edge so long or longer is a class of its own."""
_FORMS = {1: "1", **dict.fromkeys(range(2, 10), "<= 9")}
"""Classes of a kernel's area."""


MOST_LEFT = 0.5
"""Operators below this ratio stay float. Float between integers adds operators that the ratio does
not count: a copy, and transposes where convolutions around it have channels last."""

LEAST_LEFT = 2**12
"""Results of fewer elements stay integers: none of the measured nets was faster for leaving one."""


def ratio_here(node: Node) -> float | None:
    """Speed over float of an operator between two integer ones, on a CPU like this one.

    The float form has a dequantize before it and a quantize behind it. None: not measured.
    """
    name = shape_class(node)
    file = f"measured/{cpu_slug()}.json"
    return None if name is None else read_ratios("pt2e_quant.backends.onnx", file).get(name)


def conv_class(*, groups: int, weight: Sequence[int], positions: int) -> str:
    """Of a convolution.

    Args:
        groups: of its channels.
        weight: sizes of its weight: results, inputs of a group, then the kernel's.
        positions: of its result, without channels and batch.
    """
    results, inputs, *kernel = weight
    if groups == 1:
        kind = f"{_size(inputs, (4, 32))} channels"
    else:
        kind = "depthwise" if inputs == 1 and results == groups else "grouped"
    area = math.prod(kernel)
    form = "long" if max(kernel) >= _LONG else _FORMS.get(area, "wide")
    return f"conv, {kind}, kernel {form}, {_size(positions, (256, 4096))} positions"


def linear_class(*, rows: int, weight: Sequence[int]) -> str:
    """Of a product with a weight of two dimensions."""
    elements = _size(math.prod(weight), (2**14, 2**18))
    return f"linear, {_size(rows, (2, 16))} rows, {elements} weights"


def light_class(name: str, *, elements: int, is_gate: bool = False) -> str:
    """Of an operator without a weight.

    Args:
        name: of the operator.
        elements: of its largest operand.
        is_gate: whether one operand is spread over the other.
    """
    by_gate = " by a gate" if is_gate else ""
    return f"{name}{by_gate}, {_size(elements, (2**12, 2**16))} elements"


def shape_class(node: Node) -> str | None:
    """The class of an operator of a float graph; None if it was not measured, or has free sizes."""
    found = [_shape(read) for read in node.all_input_nodes[:2]]
    if node.op != "call_function" or not all(static_product(shape) for shape in (found or [()])):
        return None
    if is_call(node, _CONVS):
        return _of_conv(node, found)
    if is_call(node, ops.LINEAR):
        return linear_class(rows=math.prod(found[0][:-1]), weight=found[1])
    name = next((name for overloads, name in _LIGHT if is_call(node, overloads)), None)
    if name is None:
        return None
    elements = [math.prod(shape) for shape in found]
    is_gate = name in ("add", "mul") and len(set(elements)) > 1
    return light_class(name, elements=max(elements), is_gate=is_gate)


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


def _of_conv(conv: Node, shapes: Sequence[Sequence[int]]) -> str | None:
    positions = static_product(conv.meta["val"].shape[2:])
    if positions is None:
        return None
    return conv_class(groups=argument(conv, "groups"), weight=shapes[1], positions=positions)


def _shape(node: Node) -> Sequence[int]:
    held = node.meta.get("val")
    return held.shape if isinstance(held, Tensor) else (0,)


def _size(number: int, limits: tuple[int, int]) -> str:
    low, high = limits
    if number < low:
        return f"< {low}"
    return f"< {high}" if number < high else f">= {high}"

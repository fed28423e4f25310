"""Constants and quantize/dequantize pairs of an ONNX graph: reading them, making them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Attribute: TypeAlias = int | float | str | Sequence[int]


MICROSOFT = "com.microsoft"
"""The domain of ONNX Runtime's own operators."""


@dataclass(frozen=True, slots=True)
class Dequantized:
    """The qparams of a QuantizeLinear or DequantizeLinear whose qparams are constant.

    Args:
        node: the QuantizeLinear or DequantizeLinear.
        quantized: its integer side.
        scale: float32, a scalar or one value per channel.
        zero_point: in the integer type, same shape as `scale`.
        axis: the channel axis, None when per tensor.
    """

    node: ir.Node
    quantized: ir.Value
    scale: Array
    zero_point: Array
    axis: int | None

    @property
    def is_byte(self) -> bool:
        """True if the integers have 8 bits: ONNX Runtime has no arithmetic on 16."""
        return self.zero_point.dtype.itemsize == 1

    @property
    def limits(self) -> tuple[int, int]:
        """Smallest and largest value of the integer type."""
        info = np.iinfo(self.zero_point.dtype)
        return int(info.min), int(info.max)

    def same_qparams(self, other: "Dequantized") -> bool:
        """True if both stand for the same reals by the same integers."""
        return (
            self.axis == other.axis
            and self.zero_point.dtype == other.zero_point.dtype
            and np.array_equal(self.scale, other.scale)
            and np.array_equal(self.zero_point, other.zero_point)
        )

    def to_integer(self, real: float) -> int:
        """The integer of one real number, per tensor: rounded half to even, saturated."""
        low, high = self.limits
        if np.isinf(real):
            return low if real < 0 else high
        step = np.rint(np.float32(real) / np.float32(self.scale.item()))
        return int(np.clip(step + int(self.zero_point.item()), low, high))


def constant(value: ir.Value | None) -> Array | None:
    """The array of an initializer or of a Constant node's output, else None."""
    if value is None:
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def make_constant(graph: ir.Graph, name: str, array: Array) -> ir.Value:
    """A new initializer; the name is made unique."""
    unique, count = name, 0
    while unique in graph.initializers:
        count += 1
        unique = f"{name}_{count}"
    tensor = ir.tensor(np.ascontiguousarray(array).reshape(array.shape), name=unique)
    value = ir.Value(name=unique, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    value.const_value = tensor
    graph.register_initializer(value)
    return value


def call(
    at: ir.Node,
    op_type: str,
    inputs: Sequence[ir.Value | None],
    attributes: Mapping[str, Attribute] | None = None,
    *,
    name: str,
    like: ir.Value | None = None,
    after: bool = False,
    domain: str = "",
) -> ir.Value:
    """Insert a one-output node before (or after) `at`; it keeps `at`'s origin, `like`'s type."""
    graph = at.graph
    assert isinstance(graph, ir.Graph)
    node = ir.node(op_type, inputs, dict(attributes or {}), name=f"node_{name}", domain=domain)
    (graph.insert_after if after else graph.insert_before)(at, node)
    output = node.outputs[0]
    output.name = name
    if like is not None:
        output.type, output.shape = like.type, like.shape
    node.metadata_props.update(at.metadata_props)
    return output


def typed(value: object) -> ir.Value:
    """The value that an onnxscript operator, which has no types, returned."""
    return cast("ir.Value", value)


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, None if several do or the graph returns it."""
    users = list(value.uses())
    return users[0].node if len(users) == 1 and not value.is_graph_output() else None


def stored_matrix(value: ir.Value | None) -> Array | None:
    """The elements of a constant, which the file may store with its axes in another order."""
    node = value.producer() if value is not None else None
    if node is None or permutation(node) is None:
        return constant(value)
    stored = constant(node.inputs[0])
    return None if stored is None else stored.transpose(permutation(node))


def permutation(node: ir.Node) -> list[int] | None:
    """The order a Transpose brings axes into, None if it is none or leaves it out."""
    if node.op_type != "Transpose" or "perm" not in node.attributes:
        return None
    return list(node.attributes["perm"].as_ints())


def sizes(value: ir.Value | None) -> list[int | str | None]:
    """A value's sizes: int, the name of a dynamic one, or None; empty if the rank is unknown."""
    if value is None or value.shape is None:
        return []
    return [size if isinstance(size, int) else size.value for size in value.shape]


def redirect(old: ir.Value, new: ir.Value) -> None:
    """Let every reader of `old`, and the graph's outputs, read `new`; keep an output's name."""
    if old.is_graph_output():
        old.name, new.name = f"{old.name}_before", old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)


def remove_unread(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    """Remove those nodes that nothing reads, and what this leaves unread before them."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.graph is not graph:
            continue
        if any(v.is_graph_output() or list(v.uses()) for v in node.outputs):
            continue
        stack += [p for v in node.inputs if v is not None and (p := v.producer()) is not None]
        graph.remove(node, safe=True)


def read_dequantize(value: ir.Value | None) -> Dequantized | None:
    """The DequantizeLinear that made a value, if its scale and zero point are constants."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "DequantizeLinear":
        return None
    return _read(node, node.inputs[0])


def is_wide(value: ir.Value | None) -> bool:
    """True if a value was dequantized from 16 bits."""
    stored = read_dequantize(value)
    return stored is not None and not stored.is_byte


def read_quantize(node: ir.Node) -> Dequantized | None:
    """A QuantizeLinear with constant scale and zero point."""
    if node.op_type != "QuantizeLinear":
        return None
    return _read(node, node.outputs[0])


def _read(node: ir.Node, quantized: ir.Value | None) -> Dequantized | None:
    scale = constant(node.inputs[1])
    if quantized is None or scale is None or int_attribute(node, "block_size", 0):
        return None
    zero_input = node.inputs[2] if len(node.inputs) > 2 else None
    if zero_input is not None:
        zero_point = constant(zero_input)
    else:
        dtype = quantized.dtype
        zero_point = np.zeros(scale.shape, dtype.numpy()) if dtype is not None else None
    if zero_point is None:
        return None
    axis = int_attribute(node, "axis", 1)
    return Dequantized(node, quantized, scale, zero_point, axis if scale.ndim else None)


def int_attribute(node: ir.Node, name: str, default: int) -> int:
    """An integer attribute of a node, or what it is when left out."""
    return node.attributes[name].as_int() if name in node.attributes else default

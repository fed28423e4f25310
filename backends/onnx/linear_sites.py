"""Linears of an ONNX graph on weights stored in integers, however the exporter wrote them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import Array, constant, int_attribute, only_consumer

_FOUR_BITS = (ir.DataType.INT4, ir.DataType.UINT4)


@dataclass(frozen=True, slots=True, eq=False)
class StoredMatrix:
    """A constant matrix in integers, a scale for each row or for each group of a row.

    Args:
        node: the DequantizeLinear.
        source: the constant that holds the integers.
        scale_source: the constant that holds the scales.
        integers: int8 or uint8 [N, K], four bits too.
        scale: float32 [N, G].
        zero_point: as integers, [N, G].
        bits: 4 or 8.
    """

    node: ir.Node
    source: ir.Value
    scale_source: ir.Value
    integers: Array
    scale: Array
    zero_point: Array
    bits: int

    @property
    def is_symmetric(self) -> bool:
        """True if the integers are signed and every zero_point is 0."""
        return self.integers.dtype == np.int8 and not np.any(self.zero_point)

    @property
    def dequantized(self) -> Array:
        """float32 [N, K]."""
        rows, groups = self.scale.shape
        steps = self.integers.reshape(rows, groups, -1).astype(np.float32)
        steps = steps - self.zero_point[..., None].astype(np.float32)
        real: Array = (steps * self.scale[..., None]).reshape(rows, -1)
        return real


@dataclass(frozen=True, slots=True, eq=False)
class LinearSite:
    """`output = x @ weight.T + bias`.

    Args:
        node: the MatMul or Gemm.
        x: [..., K].
        weight: [N, K].
        bias: a constant [N], None without.
        last: the node that gives the result: `node`, or the Add of the bias behind it.
    """

    node: ir.Node
    x: ir.Value
    weight: StoredMatrix
    bias: ir.Value | None
    last: ir.Node

    @property
    def output(self) -> ir.Value:
        """[..., N]."""
        return self.last.outputs[0]


def find_linears(graph: ir.Graph) -> Iterator[LinearSite]:
    """The linears of a graph, in order; it may be edited between two."""
    for node in list(graph):
        site = _matmul(node) if node.op_type == "MatMul" else None
        if node.op_type == "Gemm":
            site = _gemm(node)
        if site is not None:
            yield site


def replace_linear(site: LinearSite) -> None:
    """Take a linear's nodes out, after its readers were given another value."""
    graph = site.node.graph
    assert isinstance(graph, ir.Graph)
    if site.last is not site.node:
        graph.remove(site.last, safe=True)
    graph.remove(site.node, safe=True)


def read_matrix(value: ir.Value | None) -> StoredMatrix | None:
    """The constant matrix behind a DequantizeLinear with a scale a row, or a group of one."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "DequantizeLinear":
        return None
    source, scale_source = node.inputs[0], node.inputs[1]
    integers, scale = constant(source), constant(scale_source)
    if source is None or scale_source is None or integers is None or scale is None:
        return None
    is_by_rows = scale.ndim == 1 and int_attribute(node, "axis", 1) == 0
    is_by_groups = scale.ndim == 2 and int_attribute(node, "axis", 1) == 1
    if integers.ndim != 2 or not (is_by_rows or is_by_groups):
        return None
    dtype = source.dtype or ir.DataType.INT8
    storage = np.int8 if dtype.is_signed() else np.uint8
    zero_point = constant(node.inputs[2]) if len(node.inputs) > 2 else np.zeros_like(scale)
    if dtype not in (*_FOUR_BITS, ir.DataType.INT8, ir.DataType.UINT8) or zero_point is None:
        return None
    return StoredMatrix(
        node=node,
        source=source,
        scale_source=scale_source,
        integers=integers.astype(storage),
        scale=scale.reshape(scale.shape[0], -1).astype(np.float32),
        zero_point=zero_point.astype(storage).reshape(scale.shape[0], -1),
        bits=4 if dtype in _FOUR_BITS else 8,
    )


def _matmul(node: ir.Node) -> LinearSite | None:
    transpose = node.inputs[1].producer() if node.inputs[1] is not None else None
    if transpose is None or transpose.op_type != "Transpose":
        return None
    x, weight = node.inputs[0], read_matrix(transpose.inputs[0])
    if x is None or weight is None:
        return None
    add = only_consumer(node.outputs[0])
    if add is not None and add.op_type == "Add":
        bias = add.inputs[1] if add.inputs[0] is node.outputs[0] else add.inputs[0]
        value = constant(bias)
        if value is not None and value.shape == (weight.integers.shape[0],):
            return LinearSite(node, x, weight, bias, add)
    return LinearSite(node, x, weight, None, node)


def _gemm(node: ir.Node) -> LinearSite | None:
    x, weight = node.inputs[0], read_matrix(node.inputs[1])
    is_plain = all(
        node.attributes[name].as_float() == 1.0
        for name in ("alpha", "beta")
        if name in node.attributes
    )
    if x is None or weight is None or not is_plain:
        return None
    if int_attribute(node, "transA", 0) or not int_attribute(node, "transB", 0):
        return None
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    value = constant(bias)
    if bias is not None and (value is None or value.shape != (weight.integers.shape[0],)):
        return None
    return LinearSite(node, x, weight, bias, node)

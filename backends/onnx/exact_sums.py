"""8-bit products whose sums are exact in ONNX Runtime on CPUs without VNNI.

There it adds each two products of uint8 and int8 in 16 bits, which cut large sums off; those of
uint8 and uint8 it adds in 32, at about two thirds of the speed. Weights whose pairs fit into 16
bits (`core.pair_sums`) stay int8, others are written as uint8 with 128 as zero point. ONNX Runtime
does the same, for all weights, where a session asks for it ("session.x64quantprecision"), but
version 1.32 loads no model then in which two weights share a zero point.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from pt2e_quant.core.pair_sums import MOST, greatest_pairs
from pt2e_quant.kernels.onednn.speed import MEASURED_CPU_VARIABLE, has_vnni

_K = 64
_ZERO_POINTS = {
    "MatMulInteger": ((1, 3),),
    "ConvInteger": ((1, 3),),
    "MatMulIntegerToFloat": ((1, 5),),
    "DynamicQuantizeLSTM": ((1, 9), (2, 11)),
}
"""Operators that read integer weights themselves: positions of weights and their zero points."""
_PRODUCTS = (*_ZERO_POINTS, "Conv", "MatMul", "Gemm")
"""Operators of products, of integers or of what was dequantized; the weight is the second input.
Transposed convolutions are computed in float."""
_SOURCES = ("DequantizeLinear", "Transpose")
"""Operators between a weight and its product."""


@cache
def sums_are_exact() -> bool:
    """True if ONNX Runtime gives the exact sums of the largest uint8 and int8 values here.

    Products of one row and of 16, which have kernels of their own; milliseconds, once a process.
    """
    weight = numpy_helper.from_array(np.full((_K, 16), 127, np.int8), "w")
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    x = helper.make_tensor_value_info("x", TensorProto.UINT8, ["rows", _K])
    y = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    graph = helper.make_graph([node], "sums", [x], [y], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    rows = (np.full((count, _K), 255, np.uint8) for count in (1, 16))
    return all(bool((session.run(None, {"x": x})[0] == 255 * 127 * _K).all()) for x in rows)


def are_exact_there() -> bool:
    """`sums_are_exact` of the CPU that files are made for: this one, or the one that is named."""
    named = os.environ.get(MEASURED_CPU_VARIABLE)
    return sums_are_exact() if named is None else has_vnni(named)


def runs_exactly(model: bytes) -> bytes:
    """A model with exact sums on this machine: itself where they are exact anyway."""
    if sums_are_exact():
        return model
    try:
        proto = onnx.load_from_string(model)
    except DecodeError:
        return model  # ONNX Runtime says what is wrong with it
    return proto.SerializeToString() if write_exactly(proto) else model


def write_exactly(model: ModelProto) -> int:
    """Write the weights whose pairs do not fit into 16 bits as uint8, in place; how many."""
    graph = model.graph
    held = {i.name: i for i in graph.initializer if i.data_type == TensorProto.INT8}
    if not held:
        return 0
    sources = {n.output[0]: n for n in _nodes(graph) if n.op_type in _SOURCES}
    higher = _Higher(held)
    weights, moved = set[str](), set[str]()
    read = [
        (node, *places)
        for node in _nodes(graph)
        if node.op_type in _PRODUCTS
        for places in _ZERO_POINTS.get(node.op_type, ((1, 2),))
    ]
    for node, at, zero_at in read:
        chain = [node, *_chain(sources, node.input[at])]
        first, first_at = chain[-1], 0 if len(chain) > 1 else at
        name = first.input[first_at]
        if name in held and _overflows(chain, held[name]):
            first.input[first_at] = name = higher.named(name)
            weights.add(name)
        if name in weights:
            # Dequantized weights have their zero point there, others where they are multiplied.
            dequantize = next((n for n in chain if n.op_type == "DequantizeLinear"), None)
            _shift_zero_point(dequantize or node, 2 if dequantize else zero_at, higher)
            moved |= {n.output[0] for n in chain[1:] if n.op_type == "Transpose"}
    graph.initializer.extend(higher.made.values())
    names = {name for node in _nodes(graph) for name in node.input}
    names |= {output.name for output in graph.output}
    _keep(graph.initializer, lambda i: i.name in names or i.name not in held)
    _keep(graph.value_info, lambda value: value.name not in moved)  # its type is another now
    return len(weights)


def _chain(sources: Mapping[str, NodeProto], name: str) -> Iterator[NodeProto]:
    """The operators between a product and its weight, the nearest to the product first."""
    while (source := sources.get(name)) is not None:
        yield source
        name = source.input[0]


def _overflows(chain: Sequence[NodeProto], held: TensorProto) -> bool:
    """True if a pair of a product's weight may be cut off.

    Args:
        chain: the product, and what is between it and the weight.
        held: the weight.
    """
    weight = torch.from_numpy(numpy_helper.to_array(held).copy())
    for moved in (n for n in reversed(chain[1:]) if n.op_type == "Transpose"):
        weight = weight.permute(_given(moved).get("perm") or tuple(range(weight.dim()))[::-1])
    node, given = chain[0], _given(chain[0])
    if node.op_type in ("Conv", "ConvInteger"):
        if weight.shape[1] == 1 and given.get("group", 1) == weight.shape[0]:
            return False  # depthwise: a kernel that adds in 32 bits
    elif weight.dim() < 2:
        weight = weight.unsqueeze(0)
    elif not given.get("transB", 0):
        weight = weight.movedim(-2, -1).flatten(0, -2)
    return bool(weight.numel()) and float(greatest_pairs(weight).max()) > MOST


def _given(node: NodeProto) -> dict[str, Any]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _shift_zero_point(node: NodeProto, at: int, higher: "_Higher") -> None:
    """Let an operator have the zero point of a weight as uint8, 128 higher; 128 for none."""
    while len(node.input) <= at:
        node.input.append("")
    zero = node.input[at]
    if zero == "" or zero in higher.held:  # else another product has shifted it
        node.input[at] = higher.named(zero)


class _Higher:
    """Constants as uint8, 128 higher.

    Args:
        held: the int8 constants of a model; that of the name "" is a zero.
    """

    def __init__(self, held: Mapping[str, TensorProto]) -> None:
        self.held = held
        self.made: dict[str, TensorProto] = {}

    def named(self, name: str) -> str:
        """The name of a constant as uint8."""
        made = f"{name}_uint8" if name else "middle_uint8"
        if made not in self.made:
            value = numpy_helper.to_array(self.held[name]) if name else np.zeros((), np.int8)
            higher = (value.astype(np.int16) + 128).astype(np.uint8)
            self.made[made] = numpy_helper.from_array(higher, made)
        return made


def _keep(entries: Any, is_kept: Callable[[Any], bool]) -> None:
    """Drop the other entries of a repeated field."""
    kept = [entry for entry in entries if is_kept(entry)]
    if len(kept) < len(entries):
        del entries[:]
        entries.extend(kept)


def _nodes(graph: GraphProto) -> Iterator[NodeProto]:
    """The operators of a graph, and of the branches of its control flow."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from _nodes(attribute.g)

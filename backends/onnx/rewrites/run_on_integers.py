"""Run on the integers what ONNX Runtime could but does not take out of its q/dq by itself."""

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Dequantized,
    call,
    constant,
    make_constant,
    only_consumer,
    read_dequantize,
    read_quantize,
    redirect,
)

_DATA_INPUTS = {"Pad": 1, "Max": None, "Min": None, "SpaceToDepth": 1}
"""Operators with integer kernels, and how many leading inputs carry data (None: all)."""


def run_on_integers(graph: ir.Graph) -> int:
    """Take the q/dq off operators that only move or compare values.

    Before:  dq(x_q) -> Pad | Max | Min | SpaceToDepth -> q, all on the same qparams
    After:   Pad | Max | Min | SpaceToDepth (x_q)
    """
    changed = 0
    for node in list(graph):
        if node.op_type not in _DATA_INPUTS:
            continue
        count = _DATA_INPUTS[node.op_type] or len(node.inputs)
        reader = only_consumer(node.outputs[0])
        after = read_quantize(reader) if reader is not None else None
        before = [read_dequantize(v) for v in node.inputs[:count]]
        if after is None or not _all_same(before, after):
            continue
        if node.op_type == "Pad" and not _quantize_pad_value(graph, node, after):
            continue
        for at, one in enumerate(before):
            assert one is not None
            node.replace_input_with(at, one.quantized)
        node.outputs[0].type = ir.TensorType(after.quantized.dtype or ir.DataType.UINT8)
        redirect(after.quantized, node.outputs[0])
        graph.remove(after.node, safe=True)
        changed += 1
    return changed


def cancel_requantize(graph: ir.Graph) -> int:
    """Take out a dequantize and quantize on the same qparams.

    Before:  x_q -> DequantizeLinear -> QuantizeLinear
    After:   x_q
    """
    changed = 0
    for node in list(graph):
        quantize = read_quantize(node)
        before = read_dequantize(node.inputs[0]) if quantize is not None else None
        if quantize is None or before is None or not quantize.same_qparams(before):
            continue
        if node.outputs[0].is_graph_output():
            continue
        redirect(node.outputs[0], before.quantized)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def subtract_by_add(graph: ir.Graph) -> int:
    """Write a quantized subtraction as the addition that ONNX Runtime has in integers.

    The complement of y_q in uint8 is 255 - y_q, which with zero point 255 - z stands for -y.

    Before:  Sub(dq(x_q), dq(y_q, s, z)) -> q
    After:   Add(dq(x_q), dq(BitwiseNot(y_q), s, 255 - z)) -> q
    """
    changed = 0
    for node in list(graph):
        reader = only_consumer(node.outputs[0]) if node.op_type == "Sub" else None
        if reader is None or read_quantize(reader) is None:
            continue
        left, right = (read_dequantize(v) for v in node.inputs)
        if left is None or right is None or right.axis is not None:
            continue
        if right.zero_point.dtype != np.uint8:
            continue
        base = node.outputs[0].name
        zero_point = np.bitwise_not(right.zero_point)
        negated = call(
            node,
            "DequantizeLinear",
            [
                call(node, "BitwiseNot", [right.quantized], name=f"{base}_not"),
                right.node.inputs[1],
                make_constant(graph, f"{base}_zero_point", zero_point),
            ],
            name=f"{base}_negated",
            like=node.inputs[1],
        )
        total = call(node, "Add", [node.inputs[0], negated], name=f"{base}_add")
        total.type, total.shape = node.outputs[0].type, node.outputs[0].shape
        redirect(node.outputs[0], total)
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _all_same(before: Sequence[Dequantized | None], after: Dequantized) -> bool:
    """On one set of qparams of 8 bits: there are no such kernels of 16."""
    is_plain = after.axis is None and after.is_byte
    return is_plain and all(one is not None and one.same_qparams(after) for one in before)


def _quantize_pad_value(graph: ir.Graph, node: ir.Node, qparams: Dequantized) -> bool:
    mode = node.attributes["mode"].as_string() if "mode" in node.attributes else "constant"
    value = node.inputs[2] if len(node.inputs) > 2 else None
    if mode != "constant":
        if value is not None:
            node.replace_input_with(2, None)
        return True
    real = constant(value) if value is not None else np.float32(0)
    if real is None:
        return False
    integer = np.array(qparams.to_integer(float(real)), qparams.zero_point.dtype)
    stored = make_constant(graph, f"{node.outputs[0].name}_value", integer)
    node.resize_inputs(max(len(node.inputs), 3))
    node.replace_input_with(2, stored)
    return True

"""Give activations unsigned integers."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    constant,
    make_constant,
    read_dequantize,
    read_quantize,
)


def unsigned_activations(graph: ir.Graph) -> int:
    """Shift int8 activations by 128 into uint8, which stands for the same reals.

    On x86 ONNX Runtime runs uint8 activations about five times faster than int8 ones, and fuses
    more of them. Graphs of quantizers made for other backends come with int8.

    Before:  QuantizeLinear(x, s, int8 z) [-> Clip] -> DequantizeLinear
    After:   QuantizeLinear(x, s, uint8 z + 128) [-> Clip] -> DequantizeLinear
    """
    changed = 0
    for node in list(graph):
        quantize = read_quantize(node)
        if quantize is None or quantize.axis is not None or quantize.zero_point.dtype != np.int8:
            continue
        chain = _readers(node)
        if chain is None:
            continue
        for reader in (node, *chain):
            _shift(graph, reader)
        changed += 1
    return changed


def _readers(node: ir.Node) -> list[ir.Node] | None:
    """What reads the integers: dequantizes, perhaps behind a Clip; None if anything else does."""
    found: list[ir.Node] = []
    for use in node.outputs[0].uses():
        reader = use.node
        if reader.op_type == "Clip" and all(constant(v) is not None for v in reader.inputs[1:]):
            behind = _readers(reader)
            if behind is None:
                return None
            found += [reader, *behind]
        elif read_dequantize(reader.outputs[0]) is not None:
            found.append(reader)
        else:
            return None
    return None if node.outputs[0].is_graph_output() else found


def _shift(graph: ir.Graph, node: ir.Node) -> None:
    """Move a node's integer constants up by 128, and its integer result's type."""
    first = 1 if node.op_type == "Clip" else 2
    for at in range(first, max(3, len(node.inputs))):
        value = node.inputs[at] if at < len(node.inputs) else None
        old = constant(value) if value is not None else np.zeros((), np.int8)
        assert old is not None
        if value is None and node.op_type == "Clip":
            continue
        shifted: Array = (old.astype(np.int16) + 128).astype(np.uint8)
        base = value.name if value is not None else f"{node.outputs[0].name}_zero_point"
        node.resize_inputs(max(len(node.inputs), at + 1))
        node.replace_input_with(at, make_constant(graph, f"{base}_unsigned", shifted))
    if node.op_type != "DequantizeLinear":
        node.outputs[0].type = ir.TensorType(ir.DataType.UINT8)
    if "output_dtype" in node.attributes:
        del node.attributes["output_dtype"]

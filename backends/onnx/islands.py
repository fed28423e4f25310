"""Read from an .onnx file which operators ONNX Runtime computes in float."""

from collections.abc import Mapping, Set

import onnx
from onnx import helper, shape_inference

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.provenance import FloatOperator
from pt2e_quant.core.size_expression import evaluate_size
from pt2e_quant.flow.report.audit import OTHER_BACKEND


def read_islands(model: bytes, floats: Set[str], capture: Capture) -> list[FloatOperator]:
    """The operators in float by their names, with the bytes at their borders.

    Args:
        model: the file's bytes.
        floats: the values that ONNX Runtime computes in float, by name.
        capture: of the call: dynamic sizes count as in the example that it was captured with.
    """
    graph = shape_inference.infer_shapes(onnx.load_from_string(model)).graph
    hints = {name: dim.hint for name, dim in capture.dims.items()}
    shown = (*graph.value_info, *graph.input, *graph.output)
    sizes = {value.name: _size_bytes(value, hints) for value in shown}
    dequantized = {n.output[0] for n in graph.node if n.op_type == "DequantizeLinear"}
    quantized = {n.input[0] for n in graph.node if n.op_type == "QuantizeLinear"}
    found = []
    for node in graph.node:
        if floats.isdisjoint(node.output) or not dequantized.isdisjoint(node.output):
            continue
        read = [name for name in dict.fromkeys(node.input) if name in dequantized]
        across = [sizes.get(n) for n in (*read, *(o for o in node.output if o in quantized))]
        found.append(
            FloatOperator(
                node=node.output[0],
                operator=node.op_type,
                module="",
                source="",
                bytes_across=None if None in across else sum(size or 0 for size in across),
                reason="ONNX Runtime runs it in float",
                remedy=OTHER_BACKEND,
            )
        )
    return found


def _size_bytes(value: onnx.ValueInfoProto, hints: Mapping[str, int]) -> int | None:
    """Bytes of a value; None where its shape is not known."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    count = 1
    for dim in kind.shape.dim:
        size = evaluate_size(dim.dim_param, hints) if dim.dim_param else dim.dim_value
        if size is None or not dim.WhichOneof("value"):
            return None
        count *= size
    return count * helper.tensor_dtype_to_np_dtype(kind.elem_type).itemsize

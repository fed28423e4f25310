"""Products of linears whose result is read as integers and in float."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.rewrites.dequantize_once import write_as_arithmetic
from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    call,
    constant,
    int_attribute,
    permutation,
    read_dequantize,
    read_quantize,
    redirect,
    remove_unread,
    stored_matrix,
)


def split_results(graph: ir.Graph) -> int:
    """Multiply integers, with a result in float, where a quantize is not all that reads it.

    ONNX Runtime takes the integers of a Gemm or MatMul only where its result has one reader that
    is a quantize, or none that is; of others it dequantizes the weight in every call.

    Before:  y = Gemm | MatMul(dq(x_q, s, z), dq(w int8), dq(b));  q(y), f(y)
    After:   y = MatMulIntegerToFloat(x_q, w[K, N], s, w_scale, z) + b;  q(y), f(y)
    """
    return _split(graph, is_portable=False)


def split_results_portable(graph: ir.Graph) -> int:
    """The same in standard operators: Cast(MatMulInteger) * (s * w_scale)."""
    return _split(graph, is_portable=True)


def _split(graph: ir.Graph, *, is_portable: bool) -> int:
    changed = 0
    for node in list(graph):
        if node.op_type in ("Gemm", "MatMul") and _is_read_twice(node.outputs[0]):
            changed += write_product(node, is_portable=is_portable)
    return changed


def _is_read_twice(value: ir.Value) -> bool:
    """True if a quantize and something else read a value."""
    readers = [use.node for use in value.uses()]
    quantizes = [reader for reader in readers if read_quantize(reader) is not None]
    return bool(quantizes) and (len(readers) > 1 or value.is_graph_output())


def write_product(node: ir.Node, *, is_portable: bool) -> bool:
    """Write one product of two dequantizes so, the second of a constant; whether it was one."""
    graph = node.graph
    if node.op_type not in ("Gemm", "MatMul") or not isinstance(graph, ir.Graph):
        return False
    x = read_dequantize(node.inputs[0])
    between = node.inputs[1].producer() if node.inputs[1] is not None else None
    is_turned = int_attribute(node, "transB", 0) == 1
    source = node.inputs[1]
    if between is not None and permutation(between) == [1, 0]:
        source, is_turned = between.inputs[0], not is_turned
    weight = read_dequantize(source)
    if x is None or weight is None or x.axis is not None or not x.is_byte:
        return False
    if not _is_plain(node):
        return False
    integers = stored_matrix(weight.quantized)
    if integers is None or integers.ndim != 2 or integers.dtype != np.int8:
        return False
    if np.any(weight.zero_point) or weight.axis not in (None, 0 if is_turned else 1):
        return False
    output = node.outputs[0]
    columns = weight.quantized
    if is_turned:
        columns = call(
            node, "Transpose", [columns], {"perm": [1, 0]}, name=f"{output.name}_columns"
        )
        columns.type = ir.TensorType(ir.DataType.INT8)
    scales = x.node.inputs[1], weight.node.inputs[1]
    zero_point = x.node.inputs[2] if len(x.node.inputs) > 2 else None
    if is_portable:
        product = call(
            node,
            "MatMulInteger",
            [x.quantized, columns, zero_point],
            name=f"{output.name}_integers",
        )
        to_float = {"to": int(ir.DataType.FLOAT)}
        real = call(node, "Cast", [product], to_float, name=f"{output.name}_float")
        both = call(node, "Mul", scales, name=f"{output.name}_scales")
        real = call(node, "Mul", [real, both], name=f"{output.name}_real", like=output)
    else:
        inputs = [x.quantized, columns, *scales, zero_point]
        name = f"{output.name}_real"
        real = call(node, "MatMulIntegerToFloat", inputs, name=name, like=output, domain=MICROSOFT)
    redirect(output, _with_bias(graph, node, real))
    remove_unread(graph, [node])
    return True


def _with_bias(graph: ir.Graph, node: ir.Node, real: ir.Value) -> ir.Value:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is None:
        return real
    stored = read_dequantize(bias)
    if stored is not None and constant(stored.quantized) is not None:
        bias = write_as_arithmetic(graph, stored.node, f"{node.outputs[0].name}_bias")
    return call(node, "Add", [real, bias], name=f"{node.outputs[0].name}_sum", like=real)


def _is_plain(node: ir.Node) -> bool:
    """True if a product neither scales nor transposes what is no weight."""
    scales = (
        node.attributes[name].as_float() for name in ("alpha", "beta") if name in node.attributes
    )
    return all(scale == 1.0 for scale in scales) and not int_attribute(node, "transA", 0)

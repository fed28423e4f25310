"""Biases of quantized products: as int32 where the product runs in integers, else kept apart."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    Dequantized,
    call,
    constant,
    is_wide,
    make_constant,
    only_consumer,
    read_dequantize,
    read_quantize,
)

_INT32_MAX = np.iinfo(np.int32).max


def integer_bias(graph: ir.Graph) -> int:
    """Give Conv and Gemm an int32 bias with scale = input scale * weight scale.

    ONNX Runtime takes an int32 bias only if its scale equals that product in float32 exactly.

    Before:  Conv | Gemm(dq(x), dq(w), bias float)
    After:   Conv | Gemm(dq(x), dq(w), dq(bias int32))
    """
    return sum(_convert(graph, node) for node in list(graph))


def _convert(graph: ir.Graph, node: ir.Node) -> bool:
    if node.op_type not in ("Conv", "Gemm") or len(node.inputs) < 3:
        return False
    x, weight = read_dequantize(node.inputs[0]), read_dequantize(node.inputs[1])
    bias, stored = _real(node.inputs[2]), read_dequantize(node.inputs[2])
    if x is None or weight is None or bias is None or x.axis is not None:
        return False
    if stored is None and (bias.dtype != np.float32 or bias.size == 0):
        return False
    if node.op_type == "Conv" and not _output_is_quantized(node):
        return False  # stays float whatever the bias is
    scale = (x.scale * weight.scale).astype(np.float32)
    steps = np.rint(bias.astype(np.float64) / scale.astype(np.float64))
    if not _output_axis(node, weight) or np.abs(steps).max(initial=0) > _INT32_MAX:
        return False
    if stored is not None and np.array_equal(stored.scale, scale):
        return False  # it is already so
    _replace(graph, node, steps.astype(np.int32), scale)
    return True


def _replace(graph: ir.Graph, node: ir.Node, steps: Array, scale: Array) -> None:
    old = node.inputs[2]
    base = (old.name if old is not None else None) or f"{node.outputs[0].name}_bias"
    inputs = [
        make_constant(graph, f"{base}_q", steps.reshape(-1)),
        make_constant(graph, f"{base}_scale", scale),
    ]
    axis = {"axis": 0} if scale.ndim else {}
    dequantized = call(
        node, "DequantizeLinear", inputs, axis, name=f"{base}_dq_{node.outputs[0].name}"
    )
    node.replace_input_with(2, dequantized)


def _output_axis(node: ir.Node, weight: Dequantized) -> bool:
    """Whether the weight's scales run along the output channels."""
    if weight.axis is None:
        return True
    transposed = "transB" in node.attributes and node.attributes["transB"].as_int() == 1
    return weight.axis == (0 if node.op_type == "Conv" or transposed else 1)


def _output_is_quantized(node: ir.Node) -> bool:
    reader = only_consumer(node.outputs[0])
    return reader is not None and read_quantize(reader) is not None


def widen_bias(graph: ir.Graph) -> int:
    """Give the bias after a quantized MatMul the shape [1, 1, N].

    ONNX Runtime fuses `MatMul + Add(bias[N])` into a float Gemm before it looks at the
    quantization; with two leading ones it leaves the Add alone and makes MatMulIntegerToFloat.
    With 16-bit activations it would quantize the weight of such a Gemm again.

    Before:  MatMul(dq(x), dq(w)) + bias[N]
    After:   MatMul(dq(x), dq(w)) + bias[1, 1, N]
    """
    changed = 0
    for node in list(graph):
        if node.op_type != "MatMul" or not _is_quantized(node):
            continue
        output = node.outputs[0]
        add = only_consumer(output)
        if add is None or add.op_type != "Add" or output.shape is None or len(output.shape) < 3:
            continue
        at = 1 if add.inputs[0] is output else 0
        old = add.inputs[at]
        bias = _real(old)
        if old is None or bias is None or bias.ndim != 1:
            continue
        values = bias.astype(np.float32).reshape(1, 1, -1)
        wide = make_constant(graph, f"{old.name}_wide", values)
        add.replace_input_with(at, wide)
        changed += 1
    return changed


def _real(value: ir.Value | None) -> Array | None:
    """A bias in float: a constant, or what an int32 constant stands for, in float64."""
    stored = read_dequantize(value)
    integers = constant(stored.quantized) if stored is not None else None
    if stored is None or integers is None:
        return constant(value)
    real: Array = (integers - stored.zero_point.astype(np.int64)) * stored.scale
    return real


def _is_quantized(product: ir.Node) -> bool:
    """Whether both sides were integers, or the left one of 16 bits."""
    return is_wide(product.inputs[0]) or all(_is_dequantized(value) for value in product.inputs)


def _is_dequantized(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Transpose":
        return _is_dequantized(node.inputs[0])
    return node is not None and node.op_type == "DequantizeLinear"

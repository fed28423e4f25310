"""Keep ONNX Runtime from making a float Gemm of a quantized linear."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Array,
    constant,
    is_wide,
    make_constant,
    only_consumer,
    read_dequantize,
)


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
        wide = make_constant(graph, f"{old.name}_wide", bias.reshape(1, 1, -1))
        add.replace_input_with(at, wide)
        changed += 1
    return changed


def _real(value: ir.Value | None) -> Array | None:
    """A bias in float: a constant, or what an int32 constant stands for."""
    stored = read_dequantize(value)
    integers = constant(stored.quantized) if stored is not None else None
    if stored is None or integers is None:
        return constant(value)
    real: Array = (integers - stored.zero_point).astype(np.float32) * stored.scale
    return real


def _is_quantized(product: ir.Node) -> bool:
    """Whether both sides were integers, or the left one of 16 bits."""
    return is_wide(product.inputs[0]) or all(_is_dequantized(value) for value in product.inputs)


def _is_dequantized(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Transpose":
        return _is_dequantized(node.inputs[0])
    return node is not None and node.op_type == "DequantizeLinear"

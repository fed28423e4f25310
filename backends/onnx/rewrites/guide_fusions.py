"""Forms that ONNX Runtime fuses rightly: int32 biases, and operators that it must not fuse."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    MICROSOFT,
    Array,
    Dequantized,
    call,
    constant,
    int_attribute,
    is_wide,
    make_constant,
    only_consumer,
    read_dequantize,
    read_quantize,
    redirect,
    remove_unread,
)

_ROUNDED = ("Conv", "ConvTranspose", "Gemm")
"""The products whose float weights ONNX Runtime rounds."""
_MOVES = ("Flatten", "MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators that ONNX Runtime moves quantizes and dequantizes past, and Flatten."""
_INT32_MAX = np.iinfo(np.int32).max


def keep_weights_float(graph: ir.Graph) -> int:
    """Keep the weights of products in float that are initializers; see `keep_weight_float`."""
    changed = 0
    for node in list(graph):
        if node.op_type in _ROUNDED:
            weight = node.inputs[1]
            if weight is not None and weight.is_initializer():
                changed += keep_weight_float(node)
    return changed


def keep_weight_float(product: ir.Node) -> bool:
    """Put a Sum of one tensor, which copies it, between a product in float and its quantize.

    ONNX Runtime 1.32 (WeightBiasQuantization) rounds float weights to int8 per tensor, at load,
    where the product reads a dequantize and leads to a quantize, at most through Relu and Clip. It
    has moved both past operators that only move values before.

    Before:  ConvTranspose(dq(x), w float) -> Relu -> q
    After:   ConvTranspose(dq(x), w float) -> Relu -> Sum -> q

    Returns:
        Whether there was need of one.
    """
    if product.op_type not in _ROUNDED or not _comes_from_dequantize(product.inputs[0]):
        return False
    output, uses = product.outputs[0], list(product.outputs[0].uses())
    while len(uses) == 1 and uses[0].node.op_type in ("Relu", "Clip"):
        output = uses[0].node.outputs[0]
        uses = list(output.uses())
    if not _leads_to_quantize(output):
        return False
    put_sum_behind(output)
    return True


def _comes_from_dequantize(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _MOVES:
        value = node.inputs[0]
        node = value.producer() if value is not None else None
    return read_dequantize(value) is not None


def _leads_to_quantize(value: ir.Value) -> bool:
    stack = [value]
    while stack:
        for use in stack.pop().uses():
            if use.node.op_type == "QuantizeLinear":
                return True
            if use.node.op_type in _MOVES and use.idx == 0:
                stack += use.node.outputs[:1]
    return False


def put_sum_behind(output: ir.Value) -> None:
    """Let all readers of a value read a copy of it."""
    node, uses = output.producer(), list(output.uses())
    assert node is not None
    kept = call(node, "Sum", [output], name=f"{output.name}_kept", like=output, after=True)
    for use in uses:
        use.node.replace_input_with(use.idx, kept)


def join_silu(graph: ir.Graph) -> int:
    """Write a SiLU of dequantized integers as the one operator that ONNX Runtime has for it.

    It would fuse the two itself, but gives each reader of a dequantize one of its own first.

    Before:  x = dq(x_q); Mul(x, Sigmoid(x))
    After:   x = dq(x_q); QuickGelu(x, alpha=1)
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Sigmoid"]:
        x, product = node.inputs[0], only_consumer(node.outputs[0])
        if x is None or product is None or product.op_type != "Mul" or not _is_dequantized(x):
            continue
        if x not in product.inputs or x.dtype != ir.DataType.FLOAT:
            continue
        output = product.outputs[0]
        name, attributes = f"{output.name}_silu", {"alpha": 1.0}
        made = call(product, "QuickGelu", [x], attributes, name=name, like=output, domain=MICROSOFT)
        redirect(output, made)
        remove_unread(graph, [product])
        changed += 1
    return changed


def relu_as_max(graph: ir.Graph) -> int:
    """Write a relu that no quantize took over, after a quantized Gemm, as Max(x, 0).

    ONNX Runtime 1.31 makes a float FusedGemm of `Gemm -> Relu` before it looks at the
    quantization, where the relu's own result is not quantized; of all activations only relu.

    Before:  Relu(Gemm(dq(x), dq(w)))
    After:   Max(Gemm(dq(x), dq(w)), 0)
    """
    changed = 0
    for node in list(graph):
        source = node.inputs[0] if node.op_type == "Relu" else None
        gemm = source.producer() if source is not None else None
        if gemm is None or gemm.op_type != "Gemm" or read_dequantize(gemm.inputs[0]) is None:
            continue
        output = node.outputs[0]
        zero = make_constant(graph, "zero", np.zeros((), np.float32))
        redirect(output, call(node, "Max", [source, zero], name=f"{output.name}_max", like=output))
        graph.remove(node, safe=True)
        changed += 1
    return changed


def pool_in_float(graph: ir.Graph) -> int:
    """Put a Sum of one tensor, which copies it, behind an AveragePool in `ceil_mode`.

    The last windows of `ceil_mode` reach over the padded tensor's end. AveragePool divides them
    by what lies inside, as torch does; QLinearAveragePool of ONNX Runtime 1.32 by the whole window.
    It is fused only with a quantize directly behind it, and no Sum is taken out.

    Before:  AveragePool(dq(x), ceil_mode=1) -> q
    After:   AveragePool(dq(x), ceil_mode=1) -> Sum -> q
    """
    changed = 0
    for node in list(graph):
        if node.op_type != "AveragePool" or not int_attribute(node, "ceil_mode", 0):
            continue
        output = node.outputs[0]
        if not any(use.node.op_type != "Sum" for use in output.uses()):
            continue
        put_sum_behind(output)
        changed += 1
    return changed


def quantize_behind_pool(graph: ir.Graph) -> int:
    """Put a Sum of one tensor, which copies it, between a MaxPool in float and its quantize.

    ONNX Runtime 1.32 (QDQPropagationTransformer) moves the quantize in front of the pool, which is
    slow in integers with channels first, as they are behind a float convolution.

    Before:  Conv -> MaxPool -> q
    After:   Conv -> MaxPool -> Sum -> q
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "MaxPool"]:
        output = node.outputs[0]
        is_read = any(use.node.op_type == "QuantizeLinear" for use in output.uses())
        if is_read and read_dequantize(node.inputs[0]) is None:
            put_sum_behind(output)
            changed += 1
    return changed


def keep_layer_norm(graph: ir.Graph) -> int:
    """Write the addition in front of a LayerNormalization as Sum.

    ONNX Runtime 1.31 fuses `Add -> LayerNormalization` into SkipLayerNormalization, whose CPU
    kernel took five times as long as the two together (129 us against 24 us for
    float[1, 64, 384], one thread, AVX512). It does not look for Sum, which adds the same.

    Before:  LayerNormalization(Add(x, y))
    After:   LayerNormalization(Sum(x, y))
    """
    changed = 0
    for node in list(graph):
        if node.op_type != "Add" or node.outputs[0].dtype not in (None, ir.DataType.FLOAT):
            continue
        output = node.outputs[0]
        if not any(use.node.op_type == "LayerNormalization" for use in output.uses()):
            continue
        total = call(node, "Sum", node.inputs, name=f"{output.name}_sum", like=output)
        redirect(output, total)
        graph.remove(node, safe=True)
        changed += 1
    return changed


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
    """True if the weight's scales run along the output channels."""
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
    """True if both sides were integers, or the left one of 16 bits."""
    return is_wide(product.inputs[0]) or all(_is_dequantized(value) for value in product.inputs)


def _is_dequantized(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Transpose":
        return _is_dequantized(node.inputs[0])
    return node is not None and node.op_type == "DequantizeLinear"

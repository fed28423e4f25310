"""Keep ONNX Runtime from fusions and integer kernels that are wrong, or slower than none."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    call,
    int_attribute,
    make_constant,
    read_dequantize,
    redirect,
)


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
        uses = list(output.uses())
        kept = call(node, "Sum", [output], name=f"{output.name}_kept", like=output, after=True)
        for use in uses:
            use.node.replace_input_with(use.idx, kept)
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

"""Keep ONNX Runtime from fusing a quantized Gemm with the relu after it, in float."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import call, make_constant, read_dequantize, redirect


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

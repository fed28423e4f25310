"""Keep ONNX Runtime from pooling integers where its integer pool divides by another number."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import call, int_attribute


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

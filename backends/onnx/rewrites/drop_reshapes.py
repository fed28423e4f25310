"""Drop reshapes that change nothing."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import redirect, sizes

__all__ = ["drop_reshapes"]


def drop_reshapes(graph: ir.Graph) -> int:
    """Let the readers of a Reshape to the same sizes read its input.

    Before:  Reshape(x[B, T, D], [B, T, D])
    After:   x
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Reshape"]:
        source, output = node.inputs[0], node.outputs[0]
        before, after = sizes(source), sizes(output)
        if source is None or output.shape is None or output.is_graph_output():
            continue
        if before != after or source.shape is None or None in before:
            continue
        redirect(output, source)
        graph.remove(node, safe=True)
        changed += 1
    return changed

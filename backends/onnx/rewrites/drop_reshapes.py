"""Drop reshapes that change nothing, or whose result is reshaped again."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import constant, redirect, remove_unread, sizes


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


def join_reshapes(graph: ir.Graph) -> int:
    """Reshape at once what is reshaped twice, where the second says all sizes itself.

    A size of 0 would be taken from the first one's result.

    Before:  Reshape(Reshape(x, [2, 17, 64]), [2, -1, 4, 16])
    After:   Reshape(x, [2, -1, 4, 16])
    """
    changed = 0
    for node in [n for n in graph if n.op_type == "Reshape"]:
        between, shape = node.inputs[0], constant(node.inputs[1])
        first = between.producer() if between is not None else None
        if first is None or first.op_type != "Reshape" or shape is None or 0 in shape:
            continue
        node.replace_input_with(0, first.inputs[0])
        remove_unread(graph, [first])
        changed += 1
    return changed

"""A weight that several products read: transposed as integers, so that each runs in integers."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    call,
    constant,
    int_attribute,
    permutation,
    read_dequantize,
    redirect,
    remove_unread,
)


def turn_shared_weights(graph: ir.Graph) -> int:
    """Transpose the integers of a weight where several products read its dequantized transpose.

    ONNX Runtime joins a Transpose that two products read to each of them, as a FusedMatMul of
    floats, before it looks for dequantizes; one that a single product reads it moves to the
    integers itself. Layers that share their weights (ALBERT's) then all ran in float.

    Before:  MatMul(x, t), MatMul(y, t),   t = Transpose(DequantizeLinear(w[N, K], scale, axis=0))
    After:   the same,                     t = DequantizeLinear(Transpose(w), scale, axis=1)
    """
    changed = 0
    for node in list(graph):
        if permutation(node) != [1, 0] or len(list(node.outputs[0].uses())) < 2:
            continue
        read = read_dequantize(node.inputs[0])
        if read is None or constant(read.quantized) is None:
            continue
        name = node.outputs[0].name
        integers = call(
            node, "Transpose", [read.quantized], {"perm": [1, 0]}, name=f"{name}_turned"
        )
        integers.type = read.quantized.type
        axis = {} if read.axis is None else {"axis": 1 - int_attribute(read.node, "axis", 1) % 2}
        inputs = [integers, *read.node.inputs[1:]]
        real = call(
            node, "DequantizeLinear", inputs, axis, name=f"{name}_real", like=node.outputs[0]
        )
        redirect(node.outputs[0], real)
        remove_unread(graph, [node])
        changed += 1
    return changed

"""Fold casts of constants, whatever their size."""

import onnx_ir as ir

from pt2e_quant.backends.onnx.values import constant, make_constant, redirect


def fold_casts(graph: ir.Graph) -> int:
    """Replace the cast of a constant by the constant in its new type.

    The exporter's own folding stops at constants of 8192 bytes, which the zero points of an
    embedding table exceed; a quantize with a computed zero point fuses with nothing.

    Two casts of one constant become one constant, so that tied weights stay tied.

    Before:  Cast(int32[V])
    After:   int8[V]
    """
    changed = 0
    made: dict[tuple[ir.Value, ir.DataType], ir.Value] = {}
    for node in list(graph):
        array = constant(node.inputs[0]) if node.op_type == "Cast" else None
        if array is None:
            continue
        dtype = ir.DataType(node.attributes["to"].as_int())
        source = node.inputs[0]
        assert source is not None
        if (source, dtype) not in made:
            name = f"{source.name}_{dtype.name.lower()}"
            made[source, dtype] = make_constant(graph, name, array.astype(dtype.numpy()))
        redirect(node.outputs[0], made[source, dtype])
        graph.remove(node, safe=True)
        changed += 1
    return changed

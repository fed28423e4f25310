"""Look embeddings up in their integers, and dequantize the rows that were found."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    Dequantized,
    call,
    constant,
    make_constant,
    read_dequantize,
    redirect,
)


def gather_integers(graph: ir.Graph) -> int:
    """Gather from an integer table instead of dequantizing all of it in every call.

    Before:  Gather(dq(table int8[V, D], scale[V]), ids)
    After:   (Cast(Gather(table, ids)) - Gather(zero_point[V, 1], ids)) * Gather(scale[V, 1], ids)
    """
    changed = 0
    for node in list(graph):
        table = read_dequantize(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or constant(table.quantized) is None:
            continue
        if node.attributes["axis"].as_int() if "axis" in node.attributes else 0:
            continue
        if table.axis == 0:
            redirect(node.outputs[0], _rows(graph, node, table))
        elif table.axis is None:
            redirect(node.outputs[0], _one_scale(node, table))
        else:
            continue
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _one_scale(node: ir.Node, table: Dequantized) -> ir.Value:
    found = _gather(node, table.quantized, f"{node.outputs[0].name}_q")
    inputs = [found, *table.node.inputs[1:]]
    name = f"{node.outputs[0].name}_dq"
    return call(node, "DequantizeLinear", inputs, name=name, like=node.outputs[0])


def _rows(graph: ir.Graph, node: ir.Node, table: Dequantized) -> ir.Value:
    base, output = node.outputs[0].name, node.outputs[0]
    scale_input = table.node.inputs[1]
    stored = scale_input.name if scale_input is not None else base
    found = _gather(node, table.quantized, f"{base}_q")
    to_float = {"to": int(ir.DataType.FLOAT)}
    real = call(node, "Cast", [found], to_float, name=f"{base}_cast", like=output)
    if np.any(table.zero_point):
        zeros = table.zero_point.astype(np.float32).reshape(-1, 1)
        zero_column = make_constant(graph, f"{stored}_zero_points", zeros)
        zero = _gather(node, zero_column, f"{base}_zero_point")
        real = call(node, "Sub", [real, zero], name=f"{base}_centred", like=output)
    column = make_constant(graph, f"{stored}_column", table.scale.reshape(-1, 1))
    scale = _gather(node, column, f"{base}_scale")
    return call(node, "Mul", [real, scale], name=f"{base}_dq", like=output)


def _gather(node: ir.Node, table: ir.Value, name: str) -> ir.Value:
    return call(node, "Gather", [table, node.inputs[1]], {"axis": 0}, name=name)

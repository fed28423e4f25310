"""Weights in blocks in standard operators, in the form that ONNX Runtime fuses by itself."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.linear_sites import (
    LinearSite,
    find_linears,
    read_matrix,
    replace_linear,
)
from pt2e_quant.backends.onnx.values import (
    Array,
    call,
    int_attribute,
    is_wide,
    make_constant,
    redirect,
)


def transpose_blocks(graph: ir.Graph) -> int:
    """Store the weights of 4-bit linears by columns, and their scales in blocks of those.

    ONNX Runtime fuses DequantizeLinear with the MatMul right behind it; other runtimes too.

    Before:  MatMul(x, Transpose(DequantizeLinear(w[N, K], scale, axis=1))) + b, also as Gemm
    After:   Sum(MatMul(x, DequantizeLinear(w[K, N], scale, axis=0)), b)

    A Sum, as ONNX Runtime makes a float Gemm of MatMul and Add before it looks at the integers.
    """
    changed = 0
    for site in find_linears(graph):
        weight = site.weight
        if weight.bits != 4 or is_wide(site.x):
            continue  # a fused product rounds its input to 8 bits
        output = site.output
        real = _by_columns(graph, site)
        result = call(site.node, "MatMul", [site.x, real], name=f"{output.name}_mm", like=output)
        if site.bias is not None:
            summands = [result, site.bias]
            result = call(site.last, "Sum", summands, name=f"{output.name}_sum", like=output)
        redirect(output, result)
        replace_linear(site)
        changed += 1
    return changed


def look_up_portable(graph: ir.Graph) -> int:
    """Look rows of blocks up as integers, and dequantize what was found.

    Gather takes no 4-bit integers: they are 4 bits in the file, 8 once it is loaded.

    Before:  Gather(dq(table uint4[V, D]), ids)
    After:   (Gather(Cast(table), ids) as [..., G, D / G] - Gather(zero_point)) * Gather(scale)
    """
    changed = 0
    for node in list(graph):
        table = read_matrix(node.inputs[0]) if node.op_type == "Gather" else None
        if table is None or int_attribute(node, "axis", 0) != 0:
            continue
        if table.scale.shape[1] == 1 and table.bits == 8:
            continue
        output, ids = node.outputs[0], node.inputs[1]
        base = output.name
        rank = len(output.shape or ()) - 1
        wide = ir.DataType.INT8 if table.integers.dtype == np.int8 else ir.DataType.UINT8
        stored = call(node, "Cast", [table.source], {"to": int(wide)}, name=f"{base}_table")
        rows = call(node, "Gather", [stored, ids], {"axis": 0}, name=f"{base}_q")
        groups = make_constant(
            graph, f"{base}_groups", np.array([0] * rank + [table.scale.shape[1], -1])
        )
        rows = call(node, "Reshape", [rows, groups], name=f"{base}_grouped")
        real = call(node, "Cast", [rows], {"to": int(ir.DataType.FLOAT)}, name=f"{base}_cast")
        zeros = table.zero_point.astype(np.float32)
        if np.any(zeros):
            real = _with_rows(graph, node, "Sub", real, zeros, ids, f"{base}_zero_point")
        real = _with_rows(graph, node, "Mul", real, table.scale, ids, f"{base}_scale")
        whole = make_constant(graph, f"{base}_whole", np.array([0] * rank + [-1]))
        redirect(output, call(node, "Reshape", [real, whole], name=f"{base}_dq", like=output))
        graph.remove(node, safe=True)
        changed += 1
    return changed


def _with_rows(
    graph: ir.Graph,
    node: ir.Node,
    op_type: str,
    real: ir.Value,
    qparams: Array,
    ids: ir.Value | None,
    name: str,
) -> ir.Value:
    held = make_constant(graph, f"{name}s", qparams[..., None])
    found = call(node, "Gather", [held, ids], {"axis": 0}, name=f"{name}_found")
    return call(node, op_type, [real, found], name=name)


def _by_columns(graph: ir.Graph, site: LinearSite) -> ir.Value:
    """A dequantize of the transposed weight, for this site alone."""
    dequantize = site.weight.node
    base = f"{site.output.name}_weight"
    source, *qparams = dequantize.inputs
    # Transposed when the file is loaded: another reader of this constant has it as it is.
    turned = call(site.node, "Transpose", [source], {"perm": [1, 0]}, name=f"{base}_q")
    assert source is not None
    turned.type = source.type
    inputs = [turned, *(_transposed(graph, value) for value in qparams)]
    axis = 1 - int_attribute(dequantize, "axis", 1)
    attributes = {"axis": axis, "block_size": int_attribute(dequantize, "block_size", 0)}
    made = call(site.node, "DequantizeLinear", inputs, attributes, name=base)
    rows, columns = site.weight.integers.shape
    made.type, made.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape((columns, rows))
    return made


def _transposed(graph: ir.Graph, value: ir.Value | None) -> ir.Value | None:
    """A constant matrix transposed, once whoever reads it; anything else as it is."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if value is None or tensor is None or len(tensor.shape) != 2:
        return value
    name = f"{value.name}_columns"
    if name in graph.initializers:
        return graph.initializers[name]
    return make_constant(graph, name, tensor.numpy().T)

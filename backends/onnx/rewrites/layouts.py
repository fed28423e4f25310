"""Reshapes that change nothing, and rows written along an axis without turning the tensor."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import (
    call,
    constant,
    make_constant,
    only_consumer,
    permutation,
    redirect,
    remove_unread,
    sizes,
)


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


def write_rows(graph: ir.Graph) -> int:
    """Give ScatterND the places of rows along an inner axis, in place of turning it outwards.

    `index_copy` into a KV cache is exported so: the whole cache is copied three times where one
    copy will do. The places are made once for all tensors of one shape.

    Before:  Transpose(ScatterND(Transpose(x), i[T, 1], Transpose(y))),   rows i of axis 2
    After:   ScatterND(x, places[B, H, T, 3], y),   x[B, H, S, D], places[b, h, t] = (b, h, i[t])
    """
    made: dict[tuple[ir.Value, tuple[int, ...]], ir.Value] = {}
    changed = 0
    for node in [n for n in graph if n.op_type == "ScatterND" and "reduction" not in n.attributes]:
        turned, index, rows = node.inputs
        back = only_consumer(node.outputs[0])
        source = _turned(turned)
        if back is None or index is None or rows is None or source is None:
            continue
        x, perm = source
        inverse = [perm.index(axis) for axis in range(len(perm))]
        leading = tuple(size for size in sizes(x)[: perm[0]] if isinstance(size, int))
        if permutation(back) != inverse or not _is_column(index) or len(leading) < perm[0]:
            continue
        if (index, leading) not in made:
            made[index, leading] = _places(graph, node, index, leading)
        output = back.outputs[0]
        inputs = [x, made[index, leading], _upright(node, rows, inverse)]
        redirect(output, call(node, "ScatterND", inputs, name=f"{output.name}_rows", like=output))
        remove_unread(graph, [back])
        changed += 1
    return changed


def _turned(value: ir.Value | None) -> tuple[ir.Value, list[int]] | None:
    """The input and the order of a Transpose that moves one inner axis to the front.

    Not the last axis: single elements are no rows.
    """
    node = value.producer() if value is not None else None
    perm = permutation(node) if node is not None else None
    source = node.inputs[0] if node is not None else None
    if perm is None or source is None or len(sizes(source)) != len(perm):
        return None
    is_moved = perm[1:] == [axis for axis in range(len(perm)) if axis != perm[0]]
    return (source, perm) if is_moved and 0 < perm[0] < len(perm) - 1 else None


def _is_column(index: ir.Value) -> bool:
    """Whether indices are [T, 1]: each names a row of the first axis."""
    return len(sizes(index)) == 2 and sizes(index)[1] == 1


def _places(graph: ir.Graph, node: ir.Node, index: ir.Value, leading: tuple[int, ...]) -> ir.Value:
    """int64 [*leading, T, axis + 1]: where each row goes."""
    axis, base = len(leading), f"{index.name}_of_{'_'.join(map(str, leading))}"
    last = np.array([0] * axis + [1], np.int64)
    first = np.zeros((*leading, 1, axis + 1), np.int64)
    first[..., 0, :axis] = np.moveaxis(np.indices(leading), 0, -1)
    column = [index, make_constant(graph, f"{base}_last", last)]
    spread = [call(node, "Mul", column, name=f"{base}_row"), make_constant(graph, base, first)]
    return call(node, "Add", spread, name=f"{base}_places")


def _upright(node: ir.Node, rows: ir.Value, inverse: list[int]) -> ir.Value:
    """The rows in the order of the tensor's own axes; one Transpose at most."""
    producer = rows.producer()
    first = permutation(producer) if producer is not None else None
    perm = inverse
    if producer is not None and first is not None and producer.inputs[0] is not None:
        rows, perm = producer.inputs[0], [first[axis] for axis in inverse]
    if perm == sorted(perm):
        return rows
    return call(node, "Transpose", [rows], {"perm": perm}, name=f"{node.outputs[0].name}_upright")

"""Tables of indices that the exporter computed ahead, stored in as few bytes as they need."""

import numpy as np
import onnx_ir as ir

from pt2e_quant.backends.onnx.values import Array, call, constant, make_constant

WORTHWHILE = 1024
"""Bytes that the file must become smaller by: the new nodes' own names take about 200."""

_NARROW = (np.uint8, np.int8, np.uint16, np.int16, np.int32)


def narrow_indices(graph: ir.Graph) -> int:
    """Store a large int64 constant in the smallest type that holds it, one value alone once.

    torch.export's own index arithmetic (relative positions, bounds, fills) leaves the exporter as
    int64 tables, which made small files larger than float ones. ONNX Runtime computes both forms
    below when it opens the file, so that a call takes no longer.

    Before:  Gather(table, places int64[N, N])         Min(x, int64[N, N] of one value)
    After:   Gather(table, Cast(places int16[N, N]))   Min(x, Expand(value, [N, N]))
    """
    changed = 0
    for value in list(graph.initializers.values()):
        readers = [use.node for use in value.uses()]
        # The branches of an If read a table of the graph around them, which has no place in both.
        if value.dtype != ir.DataType.INT64 or any(node.graph is not graph for node in readers):
            continue
        table = constant(value)
        if table is None or not readers or value.is_graph_output() or value.is_graph_input():
            continue
        narrowed = _narrowed(graph, value, table, _first(graph, readers))
        if narrowed is not None:
            value.replace_all_uses_with(narrowed)
            graph.initializers.pop(str(value.name))
            changed += 1
    return changed


def _first(graph: ir.Graph, readers: list[ir.Node]) -> ir.Node:
    """The reader that comes first, so that the new node stands before all of them."""
    return readers[0] if len(readers) == 1 else next(node for node in graph if node in readers)


def _narrowed(graph: ir.Graph, value: ir.Value, table: Array, at: ir.Node) -> ir.Value | None:
    """The same table from fewer bytes, None where that is not worth a node."""
    if table.nbytes - table.itemsize < WORTHWHILE:
        return None
    low, high, name = table.min(), table.max(), str(value.name)
    if low == high:
        one = make_constant(graph, f"{name}_value", np.array(low))
        shape = make_constant(graph, f"{name}_shape", np.array(table.shape, np.int64))
        return call(at, "Expand", [one, shape], name=f"{name}_wide", like=value)
    for kind in _NARROW:
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            stored = table.astype(kind)
            if table.nbytes - stored.nbytes < WORTHWHILE:
                return None
            narrow = make_constant(graph, f"{name}_narrow", stored)
            to = {"to": int(ir.DataType.INT64)}
            return call(at, "Cast", [narrow], to, name=f"{name}_wide", like=value)
    return None

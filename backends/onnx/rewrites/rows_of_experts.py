"""The rows of each expert of a mixture of experts: exported as marks, written as one Split."""

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx.defs import OpSchema
from onnxscript import opset21

from pt2e_quant.backends.onnx.translate.marks import MARKS, mark
from pt2e_quant.backends.onnx.values import int_attribute, redirect
from pt2e_quant.graph.idioms.experts import JoinedRows, RowsOfExpert

op: Any = opset21

_ROWS = "RowsOfExpert"
_rows = mark(_ROWS, ("x", "counts"), ("rows",), {"expert": OpSchema.AttrType.INT})


def expert_translations() -> dict[Any, Any]:
    """Operator overload to translation."""
    return {RowsOfExpert: rows_of_expert, JoinedRows: joined_rows}


def rows_of_expert(x: ir.Value, counts: ir.Value, expert: int, most: Any) -> Any:
    """A mark: the rows alone, without zeros behind them."""
    return _rows(x, counts, expert=expert)


def joined_rows(parts: Sequence[ir.Value], counts: ir.Value, ids: ir.Value) -> Any:
    """Concat, of rows alone."""
    return op.Concat(*parts, axis=0)


def split_rows(graph: ir.Graph) -> int:
    """Write the rows of all experts as one Split; what is made of them has sizes of run time.

    Before:  RowsOfExpert(x, counts, expert=0), …, RowsOfExpert(x, counts, expert=E - 1)
    After:   Split(x, counts)
    """
    marks = [n for n in graph if n.op_type == _ROWS and n.domain == MARKS]
    groups: dict[tuple[ir.Value | None, ...], list[ir.Node]] = {}
    for node in marks:
        groups.setdefault(tuple(node.inputs), []).append(node)
    for nodes in groups.values():
        made = [ir.AttrInt64("axis", 0)]
        split = ir.Node("", "Split", list(nodes[0].inputs), made, num_outputs=len(nodes))
        graph.insert_before(nodes[0], split)
        for node in nodes:
            old, rows = node.outputs[0], split.outputs[int_attribute(node, "expert", 0)]
            rows.name, rows.type, rows.shape = old.name, old.type, old.shape
            redirect(old, rows)
            graph.remove(node, safe=True)
            _forget_sizes(rows)
    return len(marks)


def _forget_sizes(rows: ir.Value) -> None:
    """Take the number of rows off the shape of a value and of all that is made of it by row."""
    stack, seen = [rows], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if value.shape is not None and len(value.shape):
            value.shape = ir.Shape([None, *value.shape[1:]])
        readers = [use.node for use in value.uses() if not _is_join(use.node)]
        stack += [output for node in readers for output in node.outputs]


def _is_join(node: ir.Node) -> bool:
    """True for what puts the rows of all experts together; there are as many as before."""
    return node.op_type == "Concat" and int_attribute(node, "axis", 1) == 0

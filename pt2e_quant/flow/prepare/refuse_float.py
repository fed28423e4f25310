"""Refuse a prepared graph that would compute in float, before any data runs through it."""

from torch.fx import GraphModule

from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.op_table import operator_name
from pt2e_quant.passes.reference.forms.registry import MOVES, form_of


def refuse_float(gm: GraphModule) -> None:
    """Refuse operators that the quantizer left float, or that have no integer form.

    What only moves data is judged by convert, which sees what it stands between.

    Raises:
        UnsupportedError: naming the first such operator and its remedy.
    """
    left = {record.node: record for record in provenance_of(gm).floats}
    for node in gm.graph.nodes:
        if node.op != "call_function" or form_of(node) in MOVES:
            continue
        record = left.get(node.name)
        name = operator_name(node)
        if record is not None:
            raise UnsupportedError(
                f"int_only: {name} stays float: {record.reason}",
                node=node,
                fix=record.fix or f'a scheme for it: quantizer.set_operator("{name}", scheme)',
            )
        if Q_ANNOTATION_KEY in node.meta and form_of(node) is None:
            raise UnsupportedError(
                f"int_only: {name} has no integer form",
                node=node,
                fix="write it with operators that have one, or decompose it before prepare",
            )

"""A q/dq graph with some of its operators in float, and no rounding between them."""

from collections.abc import Container, Mapping
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.leave_slower import CLIPS, mark_slower
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CAT, MAX_POOL1D, MAX_POOL2D, PAD, VIEWS, is_call
from pt2e_quant.graph.subgraphs import copy_with_records

MOVES = (*VIEWS, *CAT, *PAD, *MAX_POOL1D, *MAX_POOL2D)
"""They take about as long in integers as in float."""


def in_float(gm: GraphModule, reasons: Mapping[str, str]) -> GraphModule:
    """A copy in which some operators compute in float; see `put_in_float`."""
    made = copy_with_records(gm)
    put_in_float(made, reasons)
    return made


def put_in_float(gm: GraphModule, reasons: Mapping[str, str]) -> bool:
    """Have some operators of a q/dq graph compute in float, without rounding between them.

    Their weights stay integers, and every lowering computes them in float.

    Before:  conv(dq(q(relu(conv(dq(x_q), …)))), …), both convolutions named
    After:   conv(relu(conv(dq(x_q), …)), …), both marked

    Args:
        gm: the graph, which is changed.
        reasons: names of the operators, and why each is to be in float; "" for one that is
            there in any case, and only stands between others.

    Returns:
        Whether a q/dq was taken out.
    """
    editor = Editor(gm)
    gone = set()
    for quantize in [n for n in gm.graph.nodes if is_quantize(n)]:
        real = quantize.args[0]
        if not isinstance(real, Node) or not _is_inside(gm, quantize, real, reasons):
            continue
        gone.add(real.name)
        for dq in list(quantize.users):
            read = real
            if is_dequantize(real):  # of a requantize: a reader has a dequantize of its own
                read = editor.call(real.target, *real.args, like=real, before=dq)
            editor.replace(dq, read)
    for node in [n for n in gm.graph.nodes if reasons.get(n.name)]:
        # What moves real numbers is not written in integers.
        if computed_reads(gm, node) or not is_call(node, MOVES):
            mark_slower(node, reasons[node.name])
    changed = editor.finish()
    tensors = provenance_of(gm).tensors
    ends = (Role.INPUT, Role.OUTPUT)
    tensors[:] = [one for one in tensors if one.name not in gone or one.role not in ends]
    return changed


def computed_reads(gm: GraphModule, node: Node) -> list[Node]:
    """The dq of computed values that an operator reads."""
    if node.op != "call_function" or is_qdq(node):
        return []
    reads = [n for n in node.all_input_nodes if is_dequantize(n)]
    return [
        n for n in reads if not _is_constant(gm, n.args[0]) and not _is_constant(gm, real_of(n))
    ]


def real_of(dequantize: Node) -> Node | None:
    """The float value that a dequantize of computed integers stands for."""
    quantize = dequantize.args[0]
    real = quantize.args[0] if isinstance(quantize, Node) and is_quantize(quantize) else None
    return real if isinstance(real, Node) else None


def behind_clips(gm: GraphModule, real: Node) -> Node:
    """The operator that a value is of: clips in float behind it are computed with it."""
    while is_call(real, CLIPS) and not computed_reads(gm, real):
        real = real.all_input_nodes[0]
    return real


def _is_constant(gm: GraphModule, source: Any) -> bool:
    return isinstance(source, Node) and constant_of(gm, source) is not None


def _is_inside(gm: GraphModule, quantize: Node, real: Node, members: Container[str]) -> bool:
    """True if only members read what a quantize gives, and no other integers are made into it."""
    readers = [user for dq in quantize.users for user in dq.users]
    is_read = all(map(is_dequantize, quantize.users)) and bool(readers)
    others = (other for other in real.users if other is not quantize)
    if not is_read or any(r.name not in members for r in readers) or any(map(is_quantize, others)):
        return False
    source = behind_clips(gm, real)
    return source.name in members or not computed_reads(gm, source)

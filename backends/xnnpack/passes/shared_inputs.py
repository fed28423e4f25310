"""Linears that read one quantized tensor, next to each other, so that a partition can hold all."""

from itertools import pairwise

from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import QdqKind, is_quantize, kind_of_qdq
from pt2e_quant.graph.ops import LINEAR, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass


@graph_pass(needs=(), gives=())
def gather_shared_inputs(gm: GraphModule) -> PassResult:
    """Move the linears that share an input quantized at run time behind the first of them.

    ExecuTorch's partitioner takes them as one and tries to join it with its neighbours once, from
    the last one's place: an operator between the first and the last then cuts the delegate.

    Before:  g = linear(dq(x_q), …); s = sigmoid(g); u = linear(dq(x_q), …); s * u
    After:   g = linear(dq(x_q), …); u = linear(dq(x_q), …); s = sigmoid(g); s * u
    """
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    notes = []
    for node in [n for n in gm.graph.nodes if is_quantize(n)]:
        if kind_of_qdq(node) is not QdqKind.PER_TOKEN:
            continue
        readers = [r for dq in node.users for r in dq.users if is_call(r, LINEAR)]
        linears = sorted(readers, key=order.__getitem__)
        if not any(_is_apart(first, second) for first, second in pairwise(linears)):
            continue
        last, place = linears[0], order[linears[0]]
        for linear in linears[1:]:
            for part in (*_own_inputs(linear, node), linear):
                # What stands before them may have readers there: layers that share a weight.
                if order[part] > place:
                    last.append(part)
                    last, order[part] = part, place
        notes.append(Note(node.name, f"its {len(linears)} linears stand together"))
    return PassResult(bool(notes), tuple(notes))


def _own_inputs(linear: Node, quantized: Node) -> list[Node]:
    """The dq of the shared input, and what a linear reads of constants, inputs first."""
    found: dict[Node, None] = {}
    for source in linear.all_input_nodes:
        if quantized not in source.all_input_nodes:
            found |= dict.fromkeys(source.all_input_nodes)
        found[source] = None
    return list(found)


def _is_apart(first: Node, second: Node) -> bool:
    """Whether more than the second linear's own inputs stand between two linears."""
    own = {second, *second.all_input_nodes}
    own |= {n for source in second.all_input_nodes for n in source.all_input_nodes}
    current = first.next
    while current is not second:
        if current not in own:
            return True
        current = current.next
    return False

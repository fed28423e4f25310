"""Move constants that control flow takes as operands into the bodies that use them."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.graph.subgraphs import Body, bodies


@graph_pass(needs=(), gives=())
def sink_constants(gm: GraphModule) -> PassResult:
    """Give each body of cond, scan and while_loop its weights as constants of its own.

    Before:  cond(p, true_body, false_body, (x, weight)),  true_body(x, w): linear(x, w)
    After:   cond(p, true_body, false_body, (x,)),         true_body(x):    linear(x, self.weight)

    Then a body can be quantized like any other graph. `lift_constants` is the inverse. Tensors are
    shared, not copied.
    """
    notes: list[Note] = []
    _sink(gm, gm, notes)
    return PassResult(bool(notes), tuple(notes))


def _sink(top: GraphModule, gm: GraphModule, notes: list[Note]) -> None:
    calls: dict[Node, list[Body]] = {}
    for body in bodies(gm):
        if body.call.graph is gm.graph:
            calls.setdefault(body.call, []).append(body)
    for call, found in calls.items():
        sunk = _sink_call(gm, call, found)
        notes += [Note(call.name, f"{name} is a constant of its bodies") for name in sunk]
        for body in found:
            _sink(top, body.gm, notes)
    if calls:
        recompile(gm)


def _sink_call(gm: GraphModule, call: Node, found: Sequence[Body]) -> list[str]:
    if any(len(_readers(body)) > 1 for body in found):
        return []
    placeholders = [[n for n in b.gm.graph.nodes if n.op == "placeholder"] for b in found]
    positions = [
        i
        for i in range(len(placeholders[0]))
        if all(p[i] in b.constants for p, b in zip(placeholders, found, strict=True))
    ]
    names = []
    for body, own in zip(found, placeholders, strict=True):
        constants = {own[i]: body.constants[own[i]] for i in positions}
        names = _bind(gm, body.gm, constants)
    call.args = _without(call, set(positions))
    return names


def _readers(body: Body) -> list[Node]:
    """The calls that run this body: it can be changed for one only."""
    graph = body.call.graph
    return [
        user
        for node in graph.nodes
        if node.op == "get_attr" and subgraph_of(node) is body.gm
        for user in node.users
    ]


def _bind(gm: GraphModule, body: GraphModule, constants: Mapping[Node, Node]) -> list[str]:
    editor = Editor(body)
    names = []
    for inner, outer in constants.items():
        name = str(outer.target)
        if inner.users:
            editor.replace(inner, editor.constant(name, attribute(gm, name), like=inner))
        body.graph.erase_node(inner)
        names.append(name)
    editor.finish()
    return names


def _without(call: Node, positions: set[int]) -> tuple[Any, ...]:
    """The call's arguments less the operands at some positions, counted behind the last body."""
    last = max(
        i for i, a in enumerate(call.args) if isinstance(a, Node) and subgraph_of(a) is not None
    )
    kept = list(call.args[: last + 1])
    count = 0
    for argument in call.args[last + 1 :]:
        if not isinstance(argument, (list, tuple)):
            kept.append(argument)
            count += 1
            continue
        items = [item for i, item in enumerate(argument, count) if i not in positions]
        count += len(argument)
        kept.append(type(argument)(items))
    return tuple(kept)

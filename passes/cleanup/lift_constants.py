"""Pass the constants of control-flow bodies in as operands again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.subgraphs import bodies


@graph_pass(needs=(HAS_VALUES,), gives=())
def lift_constants(gm: GraphModule) -> PassResult:
    """Undo `sink_constants`: torch.export takes bodies without constants of their own.

    Before:  cond(p, true_body, false_body, (x,)),           true_body(x):    … self.weight_q
    After:   cond(p, true_body, false_body, (x, weight_q)),  true_body(x, w): … w
    """
    notes: list[Note] = []
    _lift(gm, notes)
    return PassResult(bool(notes), tuple(notes))


def _lift(gm: GraphModule, notes: list[Note]) -> None:
    calls: dict[Node, list[GraphModule]] = {}
    for found in bodies(gm):
        if found.call.graph is gm.graph:
            calls.setdefault(found.call, []).append(found.gm)
    editor = Editor(gm)
    known: list[_Lifted] = []
    for call, inner in calls.items():
        for body in inner:
            _lift(body, notes)
        names = _lift_call(editor, call, inner, known)
        notes += [Note(call.name, f"{name} is an operand") for name in names]
    editor.finish()


def _lift_call(
    editor: Editor, call: Node, inner: Sequence[GraphModule], known: list["_Lifted"]
) -> list[str]:
    """Lift the constants of one call's bodies; those of earlier calls are read where equal."""
    held = {body: _constants(body) for body in inner}
    lifted: list[_Lifted] = []
    for body, constants in held.items():
        for node in constants:
            value = attribute(body, str(node.target))
            if _place_of(node, value, lifted) is not None:
                continue
            earlier = _place_of(node, value, known)
            if earlier is None:
                made = editor.constant(str(node.target), value, like=call)
                known.append(_Lifted(str(node.target), value, made))
            lifted.append(known[-1 if earlier is None else earlier])
    if not lifted:
        return []
    operands = call.args[-1]
    assert isinstance(operands, (list, tuple))
    added = [one.outer for one in lifted]
    call.args = (*call.args[:-1], type(operands)([*operands, *added]))
    for body, constants in held.items():
        _read_inputs(body, constants, lifted)
    return [str(node.target) for node in added]


@dataclass(frozen=True, slots=True)
class _Lifted:
    """A constant of bodies: its name there, its value, and the node for it outside."""

    name: str
    value: Tensor
    outer: Node


def _place_of(node: Node, value: Tensor, lifted: Sequence[_Lifted]) -> int | None:
    """Return the lifted constant for a body's: the same tensor, or an equal one of that name.

    Branches that share a weight quantize it each for itself, as do the rounds of a loop.
    """
    for i, one in enumerate(lifted):
        if one.value is value:
            return i
        is_alike = one.name == node.target and one.value.dtype == value.dtype
        if is_alike and torch.equal(one.value, value):
            return i
    return None


def _constants(body: GraphModule) -> list[Node]:
    return [
        node
        for node in body.graph.nodes
        if node.op == "get_attr"
        and subgraph_of(node) is None
        and isinstance(attribute(body, str(node.target)), Tensor)
    ]


def _read_inputs(body: GraphModule, constants: Sequence[Node], lifted: Sequence[_Lifted]) -> None:
    """Add an input for each lifted constant, as all bodies of a call take the same operands."""
    values = {node: attribute(body, str(node.target)) for node in constants}
    inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
    place = inputs[-1].next if inputs else next(iter(body.graph.nodes))
    made: list[Node] = []
    for one in lifted:
        with body.graph.inserting_before(place):
            made.append(body.graph.placeholder(one.outer.name))
        made[-1].meta["val"] = one.outer.meta["val"]
    _inputs_first(body)
    for node, value in values.items():
        at = _place_of(node, value, lifted)
        assert at is not None
        node.replace_all_uses_with(made[at])
        body.graph.erase_node(node)
    for name in {str(node.target) for node in constants}:
        owner, _, leaf = name.rpartition(".")
        delattr(body.get_submodule(owner), leaf)
    recompile(body)


def _inputs_first(body: GraphModule) -> None:
    """Move the inputs in front of everything that now reads them."""
    first = next(n for n in body.graph.nodes if n.op != "placeholder")
    for node in [n for n in body.graph.nodes if n.op == "placeholder"]:
        first.prepend(node)

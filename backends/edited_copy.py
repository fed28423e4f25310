"""Copy a graph module with its bodies, so that a lowering can edit it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.core.unpack_op import is_unpack
from pt2e_quant.graph.alias import region_operands
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.pipeline import (
    HAS_VALUES,
    GraphPass,
    Note,
    PassResult,
    Validation,
    graph_pass,
    run_passes,
)
from pt2e_quant.graph.subgraphs import Body, bodies, copy_graph, direct_bodies
from pt2e_quant.passes.cleanup.sink_constants import sink_constants


def edited_copy(
    gm: GraphModule, passes: Sequence[GraphPass], *, validation: Validation | None = None
) -> GraphModule:
    """A copy of a graph after passes; the graph is not changed.

    Constants are shared with it, but for buffers that a call writes: those are copied. Bodies of
    control flow go through the passes first, each with its weights as constants of its own; they
    keep them so (`lift_constants` makes them operands again, as torch.export wants them).
    """
    work = copy_graph(gm)
    for name in capture_of(gm).mutated_buffers:
        owner, _, leaf = name.rpartition(".")
        holder = work.get_submodule(owner)
        setattr(holder, leaf, getattr(holder, leaf).clone())
    with torch.no_grad():
        if direct_bodies(work):
            run_passes(work, (unpack_inside, sink_constants))
        for body in direct_bodies(work):
            _edit(body.gm, passes)
        run_passes(work, passes, validation=validation)
    return work


def _edit(gm: GraphModule, passes: Sequence[GraphPass]) -> None:
    for body in direct_bodies(gm):
        _edit(body.gm, passes)
    run_passes(gm, passes)


@graph_pass(needs=(HAS_VALUES,), gives=())
def unpack_inside(gm: GraphModule) -> PassResult:
    """Hand packed constants to bodies as they are stored, and unpack them there.

    `sink_constants` then makes them constants of the bodies, where a kernel that reads packed
    weights is recognised as anywhere else.

    Before:  cond(p, t, f, (x, unpack(w_packed, 4, …))),  t(x, w): … dequantize(w)
    After:   cond(p, t, f, (x, w_packed)),                t(x, w): … dequantize(unpack(w, 4, …))
    """
    notes: list[Note] = []
    _unpack_inside(gm, notes)
    return PassResult(changed=bool(notes), notes=tuple(notes))


def _unpack_inside(gm: GraphModule, notes: list[Note]) -> None:
    calls: dict[Node, list[Body]] = {}
    for body in bodies(gm):
        if body.call.graph is gm.graph:
            calls.setdefault(body.call, []).append(body)
    readers: dict[GraphModule, set[Node]] = {}
    for call, found in calls.items():
        for body in found:
            readers.setdefault(body.gm, set()).add(call)
    editor = Editor(gm)
    for call, found in calls.items():
        operands = [n for n in call.all_input_nodes if is_unpack(n)]
        if operands and all(readers[body.gm] == {call} for body in found):
            _move(call, found)
            editor.discard(operands)
            editor.changed = True
            notes += [Note(call.name, f"{node.name} is unpacked inside") for node in operands]
        for body in found:
            _unpack_inside(body.gm, notes)
    editor.finish()


def _move(call: Node, found: Sequence[Body]) -> None:
    for gm in {body.gm for body in found}:
        editor = Editor(gm)
        inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
        for inner, outer in region_operands(call, gm):
            if outer is None or not is_unpack(outer):
                continue
            packed, *how = outer.args
            named: dict[str, Any] = dict(outer.kwargs)
            assert isinstance(packed, Node)
            inner.meta["val"] = packed.meta["val"]
            made = editor.call(
                outer.target,
                inner,
                *how,
                like=outer,
                before=inputs[-1].next,
                val=outer.meta["val"],
                **named,
            )
            editor.replace(inner, made, except_in=[made])
        editor.finish()

    def packed_of(node: Node) -> Node:
        source = node.args[0] if is_unpack(node) else node
        assert isinstance(source, Node)
        return source

    call.args = map_arg(call.args, packed_of)

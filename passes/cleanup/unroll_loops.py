"""Loops that run a fixed number of times, written as that many copies of their body."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.meta import attribute, constant_nodes, constant_of
from pt2e_quant.graph.ops import is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.cleanup.inline_regions import Inliner, give

MOST_ROUNDS = 64
"""A loop of more rounds stays: each is a copy of its operators."""

_UNKNOWN = object()
"""In place of a value that depends on the model's inputs."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def unroll_loops(gm: GraphModule) -> PassResult:
    """Write a `while_loop` out whose condition depends on constants alone, such as a counter.

    Before:  _, y = while_loop(i < 2, (i + 1, f(y)), (0, x))
    After:   y = f(f(x))
    """
    notes: list[Note] = []
    inliner = Inliner(gm)
    for call in [n for n in gm.graph.nodes if _is_loop(n)]:
        condition, body, carried, more = call.args
        graphs = [subgraph_of(part) for part in (condition, body)]
        if not all(isinstance(part, GraphModule) for part in graphs):
            continue
        rounds = _rounds(gm, graphs[0], graphs[1], carried, more)  # type: ignore[arg-type]
        if rounds is None:
            continue
        for _ in range(rounds):
            carried = inliner.copy(graphs[1], [*carried, *more], call)  # type: ignore[arg-type]
        for user in [u for u in call.users if is_getitem(u)]:
            index: Any = user.args[1]
            give(inliner.editor, user, carried[index])
            inliner.editor.erase_dead([user])
        inliner.editor.erase_dead([call])
        inliner.editor.erase_dead([condition, body])
        notes.append(Note(call.name, f"its {rounds} rounds are written out"))
    return PassResult(inliner.editor.finish(), tuple(notes))


def has_loops(gm: GraphModule) -> bool:
    """True if a graph itself calls `while_loop`."""
    return any(map(_is_loop, gm.graph.nodes))


def _is_loop(node: Node) -> bool:
    is_higher = isinstance(node.target, HigherOrderOperator)
    return is_higher and getattr(node.target, "__name__", "") == "while_loop"


def _rounds(
    gm: GraphModule,
    condition: GraphModule,
    body: GraphModule,
    carried: Sequence[Any],
    more: Sequence[Any],
) -> int | None:
    """Return the number of runs of a loop; None if that is not fixed, or beyond MOST_ROUNDS."""
    constants = constant_nodes(gm.graph)

    def known(value: Any) -> Any:
        if not isinstance(value, Node):
            return value
        if value.op == "call_function" and not value.all_input_nodes:
            return _call(value, {})  # zeros(…) and the like
        held = constant_of(gm, value) if value in constants else None
        return _UNKNOWN if held is None else held

    values, fixed = ([known(v) for v in part] for part in (carried, more))
    for count in range(MOST_ROUNDS + 1):
        (goes_on,) = _computed(condition, [*values, *fixed])
        if goes_on is _UNKNOWN:
            return None
        if not bool(goes_on):
            return count
        values = _computed(body, [*values, *fixed])
    return None


def _computed(body: GraphModule, operands: Sequence[Any]) -> list[Any]:
    """A body's results, as far as they depend only on known values."""
    found: dict[Node, Any] = {}
    given = iter(operands)
    for node in body.graph.nodes:
        if node.op == "placeholder":
            found[node] = next(given)
        elif node.op == "get_attr":
            value = attribute(body, str(node.target))
            found[node] = value if isinstance(value, Tensor) else _UNKNOWN
        elif node.op == "output":
            results: Any = map_arg(node.args[0], found.__getitem__)
            return list(results) if isinstance(results, (list, tuple)) else [results]
        else:
            found[node] = _call(node, found)
    return []


def _call(node: Node, found: Mapping[Node, Any]) -> Any:
    target: Any = node.target
    is_drawn = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    if is_drawn or any(found[n] is _UNKNOWN for n in node.all_input_nodes):
        return _UNKNOWN
    args: Any = map_arg(node.args, found.__getitem__)
    kwargs: Any = map_arg(node.kwargs, found.__getitem__)
    with torch.no_grad():
        return target(*args, **kwargs)

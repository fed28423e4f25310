"""Remove dropout that does nothing in inference, and in training while a graph is annotated.

In training it comes back behind the observers: their ranges are those of inference, where
dropout's factor 1 / (1 - p) would widen them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import copy_trace
from pt2e_quant.graph.ops import DROPOUT, argument, arguments, is_call
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite


def _input(m: Match, editor: Editor) -> Node | Skip:
    call = m.nodes["dropout"]
    if argument(call, "train") is not False and argument(call, "p") != 0:
        return Skip("dropout is in training mode: export the model after eval()")
    if "input" not in arguments(call) and m.anchor.target is not call.target:
        return Skip("the mask of the dropout is used")
    return editor.now(m.node("x"))


RULES = (Rule("removed", Op(DROPOUT, Var("x"), name="dropout"), _input),)


@graph_pass(needs=(), gives=())
def remove_dropout(gm: GraphModule) -> PassResult:
    """Replace each eval-mode dropout by its input.

    Before:  y = dropout(x, 0.5, False)
    After:   y = x
    """
    return rewrite(gm, RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedDropout:
    """A dropout that was taken out.

    Args:
        target: its operator.
        p: the share of elements that it zeroes.
        trace: the meta of its node.
        source: what it read.
        readers: what read it.
    """

    target: Any
    p: float
    trace: dict[str, Any]
    source: Node
    readers: tuple[Node, ...]


def detach_dropouts(gm: GraphModule) -> list[DetachedDropout]:
    """Let the readers of each dropout read its input.

    A dropout stays where it could not be put back at its place: a reader reads its input too, or
    it stands beside another dropout.

    Before:  y = dropout(x, 0.5, False); z = linear(y, w)
    After:   z = linear(x, w)
    """
    editor = Editor(gm)
    found = []
    for node in list(gm.graph.nodes):
        if not is_call(node, DROPOUT) or "input" not in arguments(node):
            continue
        source = argument(node, "input")
        beside = {source, *node.users}
        if set(node.users) & set(source.users) or any(is_call(n, DROPOUT) for n in beside):
            continue
        found.append(
            DetachedDropout(
                target=node.target,
                p=float(argument(node, "p")),
                trace=dict(node.meta),
                source=source,
                readers=tuple(node.users),
            )
        )
        editor.replace(node, source)
    editor.finish()
    return found


def attach_dropouts(gm: GraphModule, dropouts: Sequence[DetachedDropout]) -> None:
    """Put each dropout in front of its readers, behind whatever observes its input."""
    for dropout in dropouts:
        made: dict[Node, Node] = {}
        for reader in dropout.readers:
            for read in reader.all_input_nodes:
                if _behind_observers(read) is dropout.source:
                    if read not in made:
                        made[read] = _insert(gm, dropout, read)
                    reader.replace_input_with(read, made[read])


def _behind_observers(node: Node) -> Node:
    while node.op == "call_module" and node.name.startswith("activation_post_process"):
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    return node


def _insert(gm: GraphModule, dropout: DetachedDropout, read: Node) -> Node:
    with gm.graph.inserting_after(read):
        node = gm.graph.call_function(dropout.target, (read, dropout.p, False))
    node.meta = dict(dropout.trace)
    copy_trace(node, read)
    return node

"""Remove checks of values that a runtime's file cannot hold, with a note for each."""

from collections.abc import Iterator

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.subgraphs import named_graphs

_CHECKS = (
    aten._assert_async.default,
    aten._assert_async.msg,
    aten._assert_scalar.default,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
_ITEM = (aten.item.default,)


@graph_pass(needs=(HAS_VALUES,), gives=())
def drop_value_checks(gm: GraphModule) -> PassResult:
    """Remove checks of numbers that nothing else reads; checks of sizes stay, as they bound them.

    Before:  _assert_scalar(eq(item(all(x < 9)), 1), "…"); y = relu(x)
    After:   y = relu(x)
    """
    notes: list[Note] = []
    for body in named_graphs(gm):
        editor = Editor(body.gm)
        dead: list[Node] = []
        told: set[Node] = set()
        for node in [n for n in body.gm.graph.nodes if is_call(n, _CHECKS)]:
            read = set(_numbers(node))
            items = [n for n in read if is_call(n, _ITEM)]
            if read and not items:
                continue  # of sizes, which the inputs' own checks know
            if not items or told.isdisjoint(items):
                notes.append(Note(node.name, "this check of values is not in the file"))
            told.update(items)
            if all(_is_checked_alone(n) for n in items):
                dead.append(node)
        editor.erase_dead(dead)
        editor.finish()
    return PassResult(changed=bool(notes), notes=tuple(notes))


def _numbers(node: Node) -> Iterator[Node]:
    """The nodes without tensors that a node is computed from."""
    for source in node.all_input_nodes:
        if not isinstance(source.meta.get("val"), Tensor):
            yield source
            yield from _numbers(source)


def _is_checked_alone(number: Node) -> bool:
    """True if a number is only read by checks."""
    return all(
        is_call(user, _CHECKS)
        or (
            user.op == "call_function"
            and not isinstance(user.meta.get("val"), Tensor)
            and _is_checked_alone(user)
        )
        for user in number.users
    )

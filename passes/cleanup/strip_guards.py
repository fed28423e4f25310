"""Remove the input checks that torch leaves in the graph, and keep those of values."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.alias import nested_graphs
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass

_CHECKS = (aten._assert_tensor_metadata.default,)
_TEXT = "a check of values without a text (torch._assert_async) failed"


def _is_guard(gm: GraphModule, node: Node) -> bool:
    return (
        node.op == "call_module"
        and not node.users
        and type(attribute(gm, str(node.target))).__name__ == "GuardsFn"
    )


def _guards(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if _is_guard(gm, node) or is_call(node, _CHECKS)]


def _check(gm: GraphModule) -> str | None:
    return ", ".join(node.name for graph in nested_graphs(gm) for node in _guards(graph)) or None


no_guards = Invariant("no guard is left", _check)


@graph_pass(needs=(), gives=(no_guards,))
def strip_guards(gm: GraphModule) -> PassResult:
    """Remove the `_guards_fn` call that `ExportedProgram.module()` puts into the graph.

    The checks of dtypes that the trace knows (`_assert_tensor_metadata`) go too. Inputs are
    checked against the capture before the first forward instead, with a message that says what
    to export. Both kinds would count as readers of the values they look at. Checks of values
    stay; those without a text get one, because torch takes them for calls without effect and
    drops them silently.

    Before:  _guards_fn(x); _assert_async(ok); y = relu(x)
    After:   _assert_async(ok, "…"); y = relu(x)
    """
    notes: list[Note] = []
    for graph in list(nested_graphs(gm)):
        editor = Editor(graph)
        for node in [n for n in graph.graph.nodes if is_call(n, (aten._assert_async.default,))]:
            node.target, node.args = aten._assert_async.msg, (*node.args, _TEXT)
            notes.append(Note(node.name, "gave a check of values a text"))
        for node in _guards(graph):
            if node.op == "call_module":
                notes.append(Note(node.name, "removed torch's input guards"))
                graph.delete_submodule(str(node.target))
            else:
                notes.append(Note(node.name, "removed a check of a known dtype"))
            editor.erase_dead([node])
        editor.finish()
    return PassResult(changed=bool(notes), notes=tuple(notes))

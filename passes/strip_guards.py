"""Remove the input check that torch leaves in the graph."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import aten, is_call
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass

__all__ = ["no_guards", "strip_guards"]


_CHECKS = (aten._assert_tensor_metadata.default,)


def _guard_calls(gm: GraphModule) -> list[str]:
    return [
        str(node.target)
        for node in gm.graph.nodes
        if node.op == "call_module"
        and not node.users
        and type(attribute(gm, str(node.target))).__name__ == "GuardsFn"
    ]


def _dtype_checks(gm: GraphModule) -> list[Node]:
    return [node for node in gm.graph.nodes if is_call(node, _CHECKS)]


def _check(gm: GraphModule) -> str | None:
    return ", ".join([*_guard_calls(gm), *(n.name for n in _dtype_checks(gm))]) or None


no_guards = Invariant("no guard is left", _check)


@graph_pass(gives=(no_guards,))
def strip_guards(gm: GraphModule) -> PassResult:
    """Remove the `_guards_fn` call that `ExportedProgram.module()` puts into the graph.

    The checks of dtypes that the trace knows (`_assert_tensor_metadata`) go too. Inputs are
    checked against the capture before the first forward instead, with a message that says what
    to export. Both kinds would count as readers of the values they look at.

    Before:  _guards_fn(x); y = relu(x)
    After:   y = relu(x)
    """
    names = set(_guard_calls(gm))
    checks = _dtype_checks(gm)
    if not names and not checks:
        return PassResult(changed=False)
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and node.target in names:
            notes.append(Note(node.name, "removed torch's input guards"))
            editor.erase_dead([node])
    editor.erase_dead(checks)
    for name in names:
        gm.delete_submodule(name)
    editor.finish()
    return PassResult(changed=True, notes=tuple(notes))

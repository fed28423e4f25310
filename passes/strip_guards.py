"""Remove the input check that torch leaves in the graph."""

from torch.fx import GraphModule

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.pipeline import Invariant, Note, PassResult, graph_pass

__all__ = ["no_guards", "strip_guards"]


def _guard_calls(gm: GraphModule) -> list[str]:
    return [
        str(node.target)
        for node in gm.graph.nodes
        if node.op == "call_module"
        and not node.users
        and type(attribute(gm, str(node.target))).__name__ == "GuardsFn"
    ]


def _check(gm: GraphModule) -> str | None:
    return ", ".join(_guard_calls(gm)) or None


no_guards = Invariant("no guard module is called", _check)


@graph_pass(gives=(no_guards,))
def strip_guards(gm: GraphModule) -> PassResult:
    """Remove the `_guards_fn` call that `ExportedProgram.module()` puts into the graph.

    Inputs are checked against the capture before the first forward instead, with a message that
    says what to export. The call reads every input, so it would be a consumer in every analysis.

    Before:  _guards_fn(x); y = relu(x)
    After:   y = relu(x)
    """
    names = set(_guard_calls(gm))
    if not names:
        return PassResult(changed=False)
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if node.op == "call_module" and node.target in names:
            notes.append(Note(node.name, "removed torch's input guards"))
            editor.erase_dead([node])
    for name in names:
        gm.delete_submodule(name)
    editor.finish()
    return PassResult(changed=True, notes=tuple(notes))

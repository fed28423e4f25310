"""Max pools whose places nobody reads, as those that give no places."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import arguments, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_POOLS = {
    aten.max_pool1d_with_indices.default: aten.max_pool1d.default,
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d.default,
}


@graph_pass(needs=(HAS_VALUES,), gives=())
def drop_unread_places(gm: GraphModule) -> PassResult:
    """Replace a max pool that gives values and their places where the values alone are read.

    Before:  y = getitem(max_pool2d_with_indices(x, [2, 2]), 0)
    After:   y = max_pool2d(x, [2, 2])
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, tuple(_POOLS))]:
        read = [user for user in node.users if user.users]
        if not all(is_getitem(user) and user.args[1] == 0 for user in read):
            notes.append(Note(node.name, "its places are read", skipped=True))
            continue
        for user in read:
            editor.replace(user, _without_places(editor, node, user))
        editor.erase_dead([*node.users, node])
        notes.append(Note(node.name, "without places"))
    return PassResult(editor.finish(), tuple(notes))


def _without_places(editor: Editor, node: Node, values: Node) -> Node:
    target: Any = node.target
    return editor.call(_POOLS[target], *arguments(node).values(), like=values, before=node)

"""Write the parts of a split as slices."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import SPLIT, argument, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_as_slices(gm: GraphModule) -> PassResult:
    """Write each part of a split as a slice: one operator, one tensor, one quantize.

    Before:  a, b = split(x, 2, 1)
    After:   a = slice(x, 1, 0, 2);  b = slice(x, 1, 2, 4)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if is_getitem(node) and isinstance(node.args[0], Node) and is_call(node.args[0], SPLIT):
            editor.discard([node, node.args[0]])
            part = _slice_of(editor, node, node.args[0]) if node.users else None
            if part is not None:
                editor.replace(node, part)
                notes.append(Note(node.name, "split -> slice"))
    return PassResult(editor.finish(), tuple(notes))


def _slice_of(editor: Editor, node: Node, split: Node) -> Node | None:
    x, at = split.args[0], node.args[1]
    values = split.meta["val"]
    if split.target is aten.unbind.int or not isinstance(x, Node) or not isinstance(at, int):
        return None
    if not values[0].is_floating_point():
        return None
    dim = int(argument(split, "dim"))
    parts = [v.shape[dim] for v in values]
    if not all(isinstance(p, int) for p in parts):
        return None
    at %= len(parts)
    start = sum(parts[:at])
    return editor.call(aten.slice.Tensor, x, dim, start, start + parts[at], like=node, before=node)

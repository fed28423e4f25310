"""Operators as simpler overloads: dimensions that are named, max pools without places."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import arguments, aten, is_call, is_getitem
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
_EXTREMES = (aten.amax.default, aten.amin.default)
_POOLS = {
    aten.max_pool1d_with_indices.default: aten.max_pool1d.default,
    aten.max_pool2d_with_indices.default: aten.max_pool2d.default,
    aten.max_pool3d_with_indices.default: aten.max_pool3d.default,
}


def _asked(m: Match) -> list[int]:
    """The dimensions that a squeeze removes where they are 1, from the front."""
    rank = m.node("x").meta["val"].dim()
    rest: tuple[Any, ...] = m.anchor.args[1:]
    if not rest:
        return list(range(rank))
    dims = rest[0] if isinstance(rest[0], (list, tuple)) else (rest[0],)
    return sorted(d % rank for d in dims) if rank else []


def _named(m: Match, editor: Editor) -> Node | Skip:
    node, source = m.anchor, m.node("x")
    value = source.meta["val"]
    rest: tuple[Any, ...] = node.args[1:]
    ones = [d for d in _asked(m) if isinstance(value.shape[d], int) and value.shape[d] == 1]
    if value.dim() - len(ones) != node.meta["val"].dim():
        return Skip("what it removes depends on run-time sizes")
    x = editor.now(source)
    if not ones:
        return x
    if node.target is aten.squeeze.dims and ones == list(rest[0]):
        return Skip("it names them")
    return editor.call(aten.squeeze.dims, x, ones, like=node, before=node, val=node.meta["val"])


def _fixed(m: Match, editor: Editor) -> Node | Skip:
    value = m.node("x").meta["val"]
    if all(isinstance(value.shape[d], int) for d in _asked(m)):
        return Skip("it removes the same at every size")
    return _named(m, editor)


RULES = (Rule("named", Op(_SQUEEZES, Var("x")), _named),)
VARYING_RULES = (Rule("fixed", Op(_SQUEEZES, Var("x")), _fixed),)


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_squeezed_dims(gm: GraphModule) -> PassResult:
    """Name the dimensions of squeezes, and drop those that remove none.

    ATen squeezes a dimension of another size than 1 by doing nothing, which ONNX refuses; and a
    squeeze of all dimensions removes more of them in a call whose dynamic sizes are 1.

    Before:  y = squeeze(x[1, s0, 1]); z = squeeze(y[s0], 0)
    After:   y = squeeze(x, [0, 2]); z = y
    """
    return rewrite(gm, RULES)


@graph_pass(needs=(HAS_VALUES,), gives=())
def keep_squeezed_ranks(gm: GraphModule) -> PassResult:
    """Name the dimensions of squeezes that would remove more of them in a call of other sizes.

    What is written for the captured rank (a norm's factors, shaped for its channels) would meet
    a tensor of fewer dimensions. `name_squeezed_dims` names those of all squeezes.

    Before:  y = squeeze(x[1, s0, 1])
    After:   y = squeeze(x, [0, 2])
    """
    return rewrite(gm, VARYING_RULES)


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_reduced_dims(gm: GraphModule) -> PassResult:
    """Name the dimensions of an amax or amin over all, as torch's ONNX function of it asks.

    Before:  amax(x[2, 3])
    After:   amax(x, [0, 1])
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, _EXTREMES)]:
        given = arguments(node)
        rank = given["self"].meta["val"].dim()
        if not given["dim"] and rank:
            node.args = (given["self"], list(range(rank)), given["keepdim"])
            node.kwargs = {}
            editor.changed = True
    return PassResult(editor.finish())


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

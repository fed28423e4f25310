"""Name the dimensions that a squeeze removes, as the graph was captured."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

_SQUEEZES = (aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)


def _named(m: Match, editor: Editor) -> Node | Skip:
    node, source = m.anchor, m.node("x")
    value = source.meta["val"]
    rest: tuple[Any, ...] = node.args[1:]
    asked = list(range(value.dim()))
    if rest:
        dims = rest[0] if isinstance(rest[0], (list, tuple)) else (rest[0],)
        asked = sorted(d % value.dim() for d in dims) if value.dim() else []
    ones = [d for d in asked if isinstance(value.shape[d], int) and value.shape[d] == 1]
    if value.dim() - len(ones) != node.meta["val"].dim():
        return Skip("what it removes depends on run-time sizes")
    x = editor.now(source)
    if not ones:
        return x
    if node.target is aten.squeeze.dims and ones == list(rest[0]):
        return Skip("it names them")
    return editor.call(aten.squeeze.dims, x, ones, like=node, before=node, val=node.meta["val"])


RULES = (Rule("named", Op(_SQUEEZES, Var("x")), _named),)


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_squeezed_dims(gm: GraphModule) -> PassResult:
    """Name the dimensions of squeezes, and drop those that remove none.

    ATen squeezes a dimension of another size than 1 by doing nothing, which ONNX refuses; and a
    squeeze of all dimensions removes more of them in a call whose dynamic sizes are 1.

    Before:  y = squeeze(x[1, s0, 1]); z = squeeze(y[s0], 0)
    After:   y = squeeze(x, [0, 2]); z = y
    """
    return rewrite(gm, RULES)

"""Remove expands that change no shape."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import EXPAND
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite


def _same_sizes(before: object, after: object) -> bool:
    """Whether two sizes are equal without asking for a guard."""
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    return str(before) == str(after)


def _input(m: Match, editor: Editor) -> Node | Skip:
    value = m.node("x")
    before, after = value.meta["val"].shape, m.anchor.meta["val"].shape
    if len(before) != len(after):
        return Skip("the expand adds dimensions")
    if not all(_same_sizes(a, b) for a, b in zip(before, after, strict=True)):
        return Skip("the expand changes the shape")
    return editor.now(value)


RULES = (Rule("removed", Op(EXPAND, Var("x")), _input),)


@graph_pass(needs=(HAS_VALUES,), gives=())
def remove_noop_expand(gm: GraphModule) -> PassResult:
    """Replace an expand to the shape that its input has by the input.

    Run it on graphs without writes to activations (`functionalize_activations`).

    Before:  y = expand(x, [2, 3])   where x is f32[2, 3]
    After:   y = x
    """
    return rewrite(gm, RULES)

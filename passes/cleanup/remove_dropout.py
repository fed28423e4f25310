"""Remove dropout that does nothing in inference."""

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import DROPOUT, argument, arguments
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

"""Nearest resizing, which the delegate has no operator for, as selections of rows and pixels."""

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import fallback_of
from pt2e_quant.backends.target.select_nearest import selected_nearest
from pt2e_quant.graph.ops import RESIZE_NEAREST
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Editor, Rule, Skip, rewrite


@graph_pass(needs=(HAS_VALUES,), gives=())
def select_nearest(gm: GraphModule) -> PassResult:
    """Write a nearest resize as selections along each axis; see `selected_nearest`.

    ExecuTorch's kernel computes a place for each element, and strides from one to the next. With
    channels last it copies pixels and rows whole, by indices that are constants; convolutions have
    channels last in the delegate anyway.
    """
    return rewrite(gm, (Rule("nearest", find=Op(RESIZE_NEAREST, Var("x")), build=_selected),))


def _selected(m: Match, editor: Editor) -> Node | Skip:
    if fallback_of(m.anchor):
        return Skip("a refusal left it to ExecuTorch's kernel")
    if m.node("x").meta["val"].dtype is not torch.float32:
        return Skip("the delegate permutes floats and int8 only")
    return selected_nearest(m, editor)

"""Means over the last axis as products: the delegate has no reduction there, and norms cut it."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import MEAN, argument, aten
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite


@graph_pass(needs=(HAS_VALUES,), gives=())
def means_as_products(gm: GraphModule) -> PassResult:
    """Write the mean over a known last axis as a linear with one row of 1/D.

    An RMS norm then stays inside the delegate: ExecuTorch's own mean between two partitions costs
    a copy each way. The sum is rounded in another order, and 1/D once.

    Before:  mean(x, [-1], True)
    After:   linear(x, ones(1, D) / D)
    """

    def build(m: Match, editor: Editor) -> Node | Skip:
        x, node = m["x"], m.anchor
        value = x.meta["val"] if isinstance(x, Node) else None
        if not isinstance(value, Tensor) or value.dtype is not torch.float32:
            return Skip("it is not of float32")
        dims, rank = argument(node, "dim"), value.dim()
        width = value.shape[-1] if rank > 1 else None
        if [d % rank for d in dims or ()] != [rank - 1] or not argument(node, "keepdim"):
            return Skip("it is not over the last axis, or drops it")
        if argument(node, "dtype") is not None or not isinstance(width, int):
            return Skip("it changes the dtype, or its width is known only at run time")
        weight = editor.constant(f"mean_of_{width}", torch.full((1, width), 1 / width), like=node)
        return editor.call(aten.linear.default, x, weight, like=node)

    return rewrite(gm, (Rule("mean", find=Op(MEAN, Var("x")), build=build),))

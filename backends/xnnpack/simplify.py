"""Write operators as others that the table has, before annotation; values stay the same.

silu becomes x * sigmoid(x), a number added to an integer tensor becomes a constant, a product with
a constant matrix becomes a linear: each part then has a row, and integers of its own.
"""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.conditions import KEEP_FLOAT
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADD, ADDMM, DIV, MATMUL, MUL, SILU, SUB, argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

__all__ = ["numbers_as_constants", "simplify_for_table"]


@graph_pass()
def simplify_for_table(gm: GraphModule) -> PassResult:
    """Rewrite silu, hardsigmoid and products with constant matrices.

    Before:  silu(x);           matmul(x, w), w constant [K, N]
    After:   x * sigmoid(x);    linear(x, w.T)
    """

    def as_linear(m: Match, editor: Editor) -> Node | Skip:
        if not m.is_constant("w") or m["w"].meta["val"].dim() != 2:
            return Skip("its second operand is no constant matrix")
        if m["x"].meta["val"].dim() < 2:
            return Skip("its first operand is a vector")
        bias = m.values.get("b")
        if bias is not None and not _is_plain_bias(m):
            return Skip("its bias is no constant vector, or is scaled")
        weight = constant_of(gm, m["w"])
        assert weight is not None
        name = str(m["w"].target) if m["w"].op == "get_attr" else m["w"].name
        turned = editor.constant(f"{name}_rows", weight.t().contiguous(), like=m.anchor)
        return editor.call(aten.linear.default, m["x"], turned, bias, like=m.anchor)

    rules = (
        Rule("silu", find=Op(SILU, Var("x")), build=_silu),
        Rule(
            "matmul",
            find=Op(one_of(MATMUL, (aten.mm.default,)), Var("x"), Var("w")),
            build=as_linear,
        ),
        Rule("addmm", find=Op(ADDMM, Var("b"), Var("x"), Var("w")), build=as_linear),
    )
    return rewrite(gm, rules)


def _is_plain_bias(m: Match) -> bool:
    return (
        m.is_constant("b")
        and m["b"].meta["val"].dim() == 1
        and argument(m.anchor, "beta") == 1
        and argument(m.anchor, "alpha") == 1
    )


def _silu(m: Match, editor: Editor) -> Node | Skip:
    gate = editor.call(aten.sigmoid.default, m["x"], like=m.anchor)
    return editor.call(aten.mul.Tensor, m["x"], gate, like=m.anchor)


@graph_pass()
def numbers_as_constants(gm: GraphModule) -> PassResult:
    """Turn the number in a sum, product or quotient that will run in integers into a constant.

    Before:  mul(x, 0.5);       div(x, 6.0)
    After:   mul(x, _number);   mul(x, _number), the number 1/6
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if not is_call(node, (*ADD, *SUB, *MUL, *DIV)) or KEEP_FLOAT in node.meta:
            continue
        x, number = node.args[0], node.args[1]
        if not isinstance(x, Node) or not isinstance(number, (int, float)) or number == 0:
            continue
        if not _is_float32(x) or any(k != "alpha" or v != 1 for k, v in node.kwargs.items()):
            continue
        divides = is_call(node, DIV)
        value = torch.tensor(1.0 / number if divides else float(number))
        constant = editor.constant(f"{node.name}_number", value, like=node)
        target = aten.mul.Tensor if divides else node.target
        made = editor.call(target, x, constant, like=node, val=node.meta["val"])
        editor.replace(node, made)
        notes.append(Note(node.name, f"{number} is a constant tensor"))
    return PassResult(editor.finish(), tuple(notes))


def _is_float32(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.dtype is torch.float32

"""Linears as backends have kernels for: of products with a constant, padded to whole groups."""

from collections.abc import Callable

from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADDMM, LINEAR, MATMUL, argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite


@graph_pass(needs=(HAS_VALUES,), gives=())
def products_as_linears(gm: GraphModule) -> PassResult:
    """Write matmul, mm and addmm by a constant matrix as linears: GPT-2's layers are such.

    Scales of channels and groups then run along the rows of a weight, as those of other layers.

    Before:  addmm(b, x, w)      w: [K, N], constant; b: [N], constant
    After:   linear(x, w.T, b)
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

    products = one_of(MATMUL, (aten.mm.default,))
    rules = (
        Rule("matmul", find=Op(products, Var("x"), Var("w")), build=as_linear),
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


def pad_linears(group_size_of: Callable[[Node], int | None]) -> GraphPass:
    """The pass that pads each linear to a multiple of its group size.

    Before:  linear(x, w, b),                                     w: [rows, 100]
    After:   linear(pad(x, [0, 28]), w', b),                      w': [rows, 128]

    Args:
        group_size_of: the group size that a linear's weight will get, None for no groups.
    """

    @graph_pass(needs=(), gives=())
    def pad_linears(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_call(n, LINEAR)]:
            weight, group_size = argument(node, "weight"), group_size_of(node)
            value = constant_of(gm, weight) if isinstance(weight, Node) else None
            if group_size is None or value is None or value.shape[-1] % group_size == 0:
                continue
            missing = -value.shape[-1] % group_size
            source = argument(node, "input")
            padded = editor.call(aten.pad.default, source, [0, missing], like=node, before=node)
            name = str(weight.target) if weight.op == "get_attr" else weight.name
            held = editor.constant(f"{name}_padded", F.pad(value, (0, missing)), like=weight)
            node.replace_input_with(source, padded)
            node.replace_input_with(weight, held)
            editor.discard([weight])
            notes.append(
                Note(node.name, f"{missing} zero columns added for groups of {group_size}")
            )
        return PassResult(editor.finish(), tuple(notes))

    return pad_linears

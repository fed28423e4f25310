"""Write linears in the forms that backends have kernels for."""

import string
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADDMM, LINEAR, MATMUL, argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

ROWS = "_rows"
"""What the name of a weight ends in that is written as a linear's, transposed."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def products_as_linears(gm: GraphModule) -> PassResult:
    """Write matmul, mm and addmm by a constant matrix as linears: GPT-2's layers are such.

    Scales of channels and groups then run along the rows of a weight, as those of other layers.
    A view that joins axes for addmm's sake goes behind the linear: what stands before it, such as
    a norm, is then next to the layer.

    Before:  addmm(b, x, w)                            w: [K, N], constant; b: [N], constant
    After:   linear(x, w.T, b)

    Before:  addmm(b, view(x, [-1, K]), w)
    After:   view(linear(x, w.T, b), [-1, N])
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
        turned_rows = weight.t().contiguous()
        turned = editor.constant(f"{name}{ROWS}", turned_rows, like=m.anchor)
        if (joined := _joined_rows(m["x"])) is None:
            return editor.call(aten.linear.default, m["x"], turned, bias, like=m.anchor)
        rows, sizes = joined
        made = editor.call(aten.linear.default, rows, turned, bias, like=m.anchor)
        return editor.call(
            aten.reshape.default, made, [*sizes, turned_rows.shape[0]], like=m.anchor
        )

    products = one_of(MATMUL, (aten.mm.default,))
    rules = (
        Rule("matmul", find=Op(products, Var("x"), Var("w")), build=as_linear),
        Rule("addmm", find=Op(ADDMM, Var("b"), Var("x"), Var("w")), build=as_linear),
    )
    return rewrite(gm, rules)


@graph_pass(needs=(HAS_VALUES,), gives=())
def vectors_as_rows(gm: GraphModule) -> PassResult:
    """Give linears by a vector, which torch takes too, a weight of one row.

    Before:  linear(x, w, b)                                     w: [K]; b: []
    After:   linear(x, w.unsqueeze(0), b.unsqueeze(0)).squeeze(-1)
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, LINEAR)]:
        x, *given = (argument(node, name) for name in ("input", "weight", "bias"))
        if given[0].meta["val"].dim() != 1:
            continue
        rows = (
            None if v is None else editor.call(aten.unsqueeze.default, v, 0, like=node)
            for v in given
        )
        made = editor.call(aten.linear.default, x, *rows, like=node)
        editor.replace(node, editor.call(aten.squeeze.dim, made, -1, like=node))
    return PassResult(editor.finish(), ())


@graph_pass(needs=(HAS_VALUES,), gives=())
def einsums_as_linears(gm: GraphModule) -> PassResult:
    """Write einsum of a value and a constant, whose axes are summed or new, as a linear.

    Before:  einsum("btd,hde->bhte", x, w)                    w: [H, D, E], constant
    After:   linear(x, w').unflatten(-1, [H, E]).permute(…)   w': [H * E, D]
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.target is aten.einsum.default]:
        made = _einsum_as_linear(node, editor)
        if isinstance(made, Node):
            editor.replace(node, made)
        text = made.reason if isinstance(made, Skip) else "written as a linear"
        notes.append(Note(node.name, text, skipped=isinstance(made, Skip)))
    return PassResult(editor.finish(), tuple(notes))


def _einsum_as_linear(node: Node, editor: Editor) -> Node | Skip:
    operands: Sequence[Node] = argument(node, "tensors")
    held = [constant_of(editor.gm, n) for n in operands]
    if len(operands) != 2 or sum(value is None for value in held) != 1:
        return Skip("it has another number of operands than a value and a constant")
    at = 0 if held[0] is None else 1
    x, weight = operands[at], held[1 - at]
    assert weight is not None
    if x.meta["val"].dtype != weight.dtype or not weight.is_floating_point():
        return Skip("its operands have different dtypes, or are integers")
    terms = axes_of_terms(argument(node, "equation"), [n.meta["val"].dim() for n in operands])
    if terms is None:
        return Skip("its equation repeats an axis of an operand, or names no result")
    left, right, result = terms[at], terms[1 - at], terms[2]
    summed = [axis for axis in left if axis in right and axis not in result]
    kept, new = ([a for a in term if a not in summed] for term in (left, right))
    if not (summed and kept and new) or sorted(kept + new) != sorted(result):
        return Skip("an axis of its constant is neither summed nor new")
    if any(x.meta["val"].shape[left.index(a)] != weight.shape[right.index(a)] for a in summed):
        return Skip("an axis of size 1 is expanded")
    rows = weight.permute([right.index(axis) for axis in new + summed])
    return _linear_of_axes(node, editor, x, rows, (left, kept, summed, new, result))


def _linear_of_axes(
    node: Node, editor: Editor, x: Node, rows: Tensor, axes: tuple[Sequence[str], ...]
) -> Node:
    """The linear between a permutation of its input's axes and one of its result's."""
    left, kept, summed, new, result = axes
    sizes = list(rows.shape[: len(new)])
    flat = rows.reshape(prod(sizes), -1).contiguous()
    weight = editor.constant(f"{node.name}_rows", flat, like=node)
    y = permuted(x, [left.index(axis) for axis in (*kept, *summed)], editor, node)
    if len(summed) > 1:
        y = editor.call(aten.flatten.using_ints, y, len(kept), -1, like=node)
    y = editor.call(aten.linear.default, y, weight, like=node)
    if len(new) > 1:
        y = editor.call(aten.unflatten.int, y, -1, sizes, like=node)
    made = [*kept, *new]
    return permuted(y, [made.index(axis) for axis in result], editor, node)


def permuted(x: Node, order: list[int], editor: Editor, like: Node) -> Node:
    """A tensor with its axes in another order; itself if they are in order."""
    if order == sorted(order):
        return x
    return editor.call(aten.permute.default, x, order, like=like)


def axes_of_terms(equation: str, ranks: Sequence[int]) -> list[str] | None:
    """The axes of each operand and of the result, a letter each, those of an ellipsis too."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    terms = [*inputs.split(","), result]
    if not arrow or len(terms) != len(ranks) + 1:
        return None
    named = [len(term.replace("...", "")) for term in terms]
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [
        rank - count for rank, count, t in zip(ranks, named, terms, strict=False) if "..." in t
    ]
    if len(set(hidden)) > 1:
        return None
    stands = "".join(spare[: hidden[0]]) if hidden else ""
    terms = [term.replace("...", stands) for term in terms]
    return terms if all(len(set(term)) == len(term) for term in terms) else None


def _joined_rows(x: Node) -> tuple[Node, list[Any]] | None:
    """Return the tensor whose rows a view joins, and the view's leading sizes; None if no view."""
    if not is_call(x, (aten.view.default, aten.reshape.default)):
        return None
    source, sizes = x.args[0], x.args[1]
    if not isinstance(source, Node) or not isinstance(sizes, (list, tuple)):
        return None
    before, after = (n.meta["val"].shape for n in (source, x))
    if len(before) <= len(after) or before[-1] != after[-1]:
        return None
    return source, list(sizes[:-1])


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

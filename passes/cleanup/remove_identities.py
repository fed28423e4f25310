"""Remove operators that return their input: aliases, casts, sums with 0, expands."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_value
from pt2e_quant.graph.ops import (
    ADD,
    BATCH_NORM,
    CONV,
    CONV_TRANSPOSE,
    DIV,
    EXPAND,
    LINEAR,
    MAXIMUM,
    MINIMUM,
    MUL,
    SUB,
    argument,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.graph.pipeline import HAS_VALUES, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

_ALIASES = (
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh.default,
)
_CASTS = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.type_as.default,
)
_FACTORS = (*MUL, *DIV)
_LAYERS = (*CONV, *CONV_TRANSPOSE, *LINEAR, *BATCH_NORM)


def _input(m: Match, editor: Editor) -> Node:
    return editor.now(m.node("x"))


def _input_of_cast(m: Match, editor: Editor) -> Node | Skip:
    before, after = m.node("x").meta["val"], m.anchor.meta["val"]
    if before.dtype != after.dtype or before.device != after.device:
        return Skip("the cast changes the dtype or the device")
    if before.layout != after.layout:
        return Skip("the cast changes the layout")
    return editor.now(m.node("x"))


def _has_neutral(call: Node) -> bool:
    """True if the second operand is the neutral number."""
    number = argument(call, "other")
    return isinstance(number, (int, float)) and number == is_call(call, _FACTORS)


def _input_of_neutral(m: Match, editor: Editor) -> Node | Skip:
    """A layer's result: of an input or a buffer, a sum with 0 may be a copy that is needed."""
    x = m["x"]
    if not isinstance(x, Node) or not is_call(editor.now(x), _LAYERS):
        return Skip("its first operand is no layer's result")
    return _input_of_cast(m, editor)


RULES = (
    Rule("removed", Op(_ALIASES, Var("x")), _input),
    Rule("removed a cast to the same dtype", Op(_CASTS, Var("x")), _input_of_cast),
    Rule("removed", Op((*ADD, *SUB, *_FACTORS), Var("x"), where=_has_neutral), _input_of_neutral),
)


@graph_pass(needs=(HAS_VALUES,), gives=())
def remove_identities(gm: GraphModule) -> PassResult:
    """Replace aliases, casts to the dtype that a value has, and sums with 0 by their input.

    They stand between operators that fuse (models cast around their norms to be safe, and start
    sums of branches that may be absent at 0). Run it
    on graphs without writes to activations (`functionalize_activations`).

    Before:  y = add(a, b); z = to(y, f32); w = relu(z)   where y is float32
    After:   y = add(a, b); w = relu(y)
    """
    return rewrite(gm, RULES)


@graph_pass(needs=(HAS_VALUES,), gives=())
def remove_noop_casts(gm: GraphModule) -> PassResult:
    """Replace casts to the dtype that a value has by the value; for graphs that train too.

    Before:  y = rsqrt(mean(to(x, f32)))   where x is float32
    After:   y = rsqrt(mean(x))
    """
    return rewrite(gm, RULES[1:2])


def _same_sizes(before: object, after: object) -> bool:
    """True if two sizes are equal without asking for a guard."""
    if isinstance(before, int) and isinstance(after, int):
        return before == after
    return str(before) == str(after)


def _input_of_expand(m: Match, editor: Editor) -> Node | Skip:
    value = m.node("x")
    before, after = value.meta["val"].shape, m.anchor.meta["val"].shape
    if len(before) != len(after):
        return Skip("the expand adds dimensions")
    if not all(_same_sizes(a, b) for a, b in zip(before, after, strict=True)):
        return Skip("the expand changes the shape")
    return editor.now(value)


_EXPAND_RULES = (Rule("removed", Op(EXPAND, Var("x")), _input_of_expand),)


@graph_pass(needs=(HAS_VALUES,), gives=())
def remove_noop_expand(gm: GraphModule) -> PassResult:
    """Replace an expand to the shape that its input has by the input.

    Run it on graphs without writes to activations (`functionalize_activations`).

    Before:  y = expand(x, [2, 3])   where x is f32[2, 3]
    After:   y = x
    """
    return rewrite(gm, _EXPAND_RULES)


_BROADCASTING = one_of(ADD, SUB, MUL, DIV, MINIMUM, MAXIMUM)


@graph_pass(needs=(HAS_VALUES,), gives=())
def broadcast_expanded(gm: GraphModule) -> PassResult:
    """Let operators of two tensors broadcast what was expanded for them.

    Before:  div(x, expand(norm[2, 1], [2, 8]))
    After:   div(x, norm)
    """
    rule = Rule("expand", Op(_BROADCASTING, Var("a"), Var("b")), _broadcast)
    return rewrite(gm, (rule,))


def _broadcast(m: Match, editor: Editor) -> Node | Skip:
    node, options = m.anchor, dict[str, Any](m.anchor.kwargs)
    shape = node.meta["val"].shape
    operands: list[Any] = [editor.now(x) if isinstance(x, Node) else x for x in (m["a"], m["b"])]
    for at, expanded in enumerate(operands):
        if not isinstance(expanded, Node) or not is_call(expanded, EXPAND):
            continue
        given = list(operands)
        given[at] = expanded.args[0]
        made = fake_value(editor.mode, node.target, tuple(given), options).shape
        if len(made) == len(shape) and all(map(_same_sizes, made, shape)):
            return editor.call(node.target, *given, like=node, val=node.meta["val"], **options)
    return Skip("it reads nothing expanded, or its other operand is no larger")

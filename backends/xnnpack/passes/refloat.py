"""Put back to float what the delegate would leave to ExecuTorch, and say so.

A dq that the delegate does not take runs as an operator of its own at every call; in front of a
convolution's weight it even returns wrong numbers (ExecuTorch 1.4). So every q/dq is checked here
against the form that the partitioner takes, and folded or dropped if it has another.
"""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import leave_of
from pt2e_quant.backends.xnnpack.passes.kernel_forms import (
    GEMMS,
    gives_static_int8,
    is_static_int8,
    operands,
    why_no_kernel,
)
from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view_shape
from pt2e_quant.backends.xnnpack.passes.scale_limits import why_no_product
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import ADDMM, CONV1D, CONV_TRANSPOSE1D, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def unfold_biases(gm: GraphModule) -> PassResult:
    """Give a convolution or linear its bias in float: the delegate makes the same integers of it.

    Before:  linear(dq(x_q), dq(w_q), dq(b_q))
    After:   linear(dq(x_q), dq(w_q), b), b the float values of b_q
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
        readers = [u for u in node.users if is_call(u, GEMMS) and _bias_of(u) is node]
        source = node.args[0]
        if len(readers) == len(node.users) == 1 and isinstance(source, Node):
            if constant_of(gm, source) is not None:
                _fold(gm, editor, node)
                notes.append(Note(node.name, "the delegate makes the integer bias itself"))
    return PassResult(editor.finish(), tuple(notes))


def _bias_of(node: Node) -> Any:
    return argument(node, "self" if is_call(node, ADDMM) else "bias")


@graph_pass(needs=(HAS_VALUES,), gives=())
def refloat_products(gm: GraphModule) -> PassResult:
    """Fold the weight of each convolution or linear whose scales XNNPACK refuses, or that is left.

    The values that it gives are those of its q/dq: it reads a dq, and a q reads it.

    Before:  q(linear(dq(x_q), dq(w_q)))
    After:   q(linear(dq(x_q), w)), w the float values of w_q
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, GEMMS)]:
        reason, weight = why_no_product(gm, node), operands(node)[1]
        is_left = leave_of(node) and is_dequantize(weight)
        is_left = is_left and constant_of(gm, weight.args[0]) is not None
        if (reason is not None or is_left) and len(weight.users) == 1:
            _fold(gm, editor, weight)
            if is_call(node, (*CONV1D, *CONV_TRANSPOSE1D)):
                _apart(editor, node)
            if reason is not None:
                notes.append(Note(node.name, f"runs in float: {reason}"))
    return PassResult(editor.finish(), tuple(notes))


def _apart(editor: Editor, conv: Node) -> None:
    """Put views of their own shapes between a float conv1d and the dq and q around it.

    ExecuTorch (1.4) writes it as a conv2d, and takes q/dq next to it for the conv2d's own. With
    two dynamic sizes it is a conv2d already.
    """
    x = argument(conv, "input")
    shape, made_shape = view_shape(x.meta["val"]), view_shape(conv.meta["val"])
    read = editor.call(aten.view.default, x, shape, like=conv, before=conv)
    named: Any = conv.kwargs
    made = editor.call(conv.target, read, *conv.args[1:], like=conv, before=conv, **named)
    made = editor.call(aten.clone.default, made, like=conv, before=conv)
    editor.replace(conv, editor.call(aten.view.default, made, made_shape, like=conv, before=conv))


@graph_pass(needs=(HAS_VALUES,), gives=())
def refloat_leftovers(gm: GraphModule) -> PassResult:
    """Fold or drop each q/dq that has no form the delegate takes.

    Before:  linear(x, dq(w_q)), x and the result float
    After:   linear(x, w), w the float values of w_q
    """
    editor = Editor(gm)
    notes: list[Note] = []
    for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
        source = node.args[0]
        assert isinstance(source, Node)
        integers = constant_of(gm, source)
        if integers is not None:
            reason = _constant_reason(gm, node)
            if reason is not None:
                readers = ", ".join(u.name for u in node.users)
                _fold(gm, editor, node)
                notes.append(Note(readers, reason))
        elif is_quantize(source) and (reason := _run_time_reason(gm, node)) is not None:
            editor.replace(node, editor.now(source.args[0]))  # type: ignore[arg-type]  # a node
            editor.discard([source, *_dynamic_qparams(source)])
            if not any(leave_of(reader) for reader in node.users):
                notes.append(Note(node.name, reason))
    return PassResult(editor.finish(), tuple(notes))


def _run_time_reason(gm: GraphModule, node: Node) -> str | None:
    """Why the delegate would not take the q/dq of a run-time value; None if it does."""
    if is_static_int8(node):
        return None
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], GEMMS):
        activation, weight = operands(users[0])
        if activation is node and isinstance(weight, Node) and is_dequantize(weight):
            return why_no_kernel(gm, users[0])
    return "the delegate takes static per-tensor int8, and int8 per token of linears, alone"


def _dynamic_qparams(quantize: Node) -> list[Node]:
    """The nodes that compute a dynamic quantize's scale and zero_point."""
    picks = [a for a in quantize.args[1:3] if isinstance(a, Node) and a.op == "call_function"]
    return [*picks, *dict.fromkeys(n for pick in picks for n in pick.all_input_nodes)]


def _fold(gm: GraphModule, editor: Editor, node: Node) -> None:
    """Replace a dq of a constant by the float values it gives."""
    target: Any = node.target
    args = [constant_of(gm, a) if isinstance(a, Node) else a for a in node.args]
    value: Tensor = target(*args, **node.kwargs)
    source = node.args[0]
    assert isinstance(source, Node)
    name = str(source.target) if source.op == "get_attr" else source.name
    held = editor.constant(f"{name.removesuffix('_q')}_dq", value.contiguous(), like=node)
    editor.replace(node, held)


def _constant_reason(gm: GraphModule, node: Node) -> str | None:
    """Why the delegate would not take a constant's dq where it stands; None if it does."""
    users = list(node.users)
    if len(users) != 1:
        return "its integers have several readers"
    user = users[0]
    if not is_call(user, GEMMS):
        return None if is_static_int8(node) and _is_integer_op(user) else "it has no integer form"
    if operands(user)[1] is not node:
        return "it is no weight of this operator"
    return why_no_kernel(gm, user)


def _is_integer_op(user: Node) -> bool:
    """Whether all tensors of an operator are static int8."""
    inputs = [n for n in user.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return all(is_static_int8(n) for n in inputs) and gives_static_int8(user)

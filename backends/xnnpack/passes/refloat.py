"""Put operators back to float that the delegate would leave to ExecuTorch, and report them.

A dq that the delegate does not take runs as an operator of its own at every call; in front of a
convolution's weight it even returns wrong numbers (ExecuTorch 1.4). So every q/dq is checked here
against the form that the partitioner takes, and folded or dropped if it has another.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import Fallback, fallback_of, mark_fallback
from pt2e_quant.backends.target.leave_slower import find_slower
from pt2e_quant.backends.xnnpack.passes.kernel_forms import (
    GEMMS,
    gives_static_int8,
    is_static_int8,
    is_weight_only,
    operands,
    why_no_kernel,
)
from pt2e_quant.backends.xnnpack.passes.large_kernels import large_kernels
from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view_shape
from pt2e_quant.backends.xnnpack.passes.scale_limits import why_no_product
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import (
    CHOOSE_QPARAMS_OPS,
    ChoosePerToken,
    DequantizePerToken,
    QdqKind,
    QuantizePerToken,
    is_dequantize,
    is_qdq,
    is_quantize,
    kind_of_qdq,
)
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, origin_name
from pt2e_quant.graph.ops import (
    ADDMM,
    CONV1D,
    CONV_TRANSPOSE1D,
    ELU,
    GELU,
    HARDSWISH,
    LEAKY_RELU,
    LINEAR,
    SIGMOID,
    TANH,
    Overloads,
    argument,
    aten,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.qdq.remove_qdq import fold_dequantize

_FUNCTIONS: Overloads = (
    *(*ELU, *GELU, *HARDSWISH, *LEAKY_RELU, *SIGMOID, *TANH),
    *(aten.abs.default, aten.ceil.default, aten.exp.default, aten.floor.default),
    *(aten.log.default, aten.neg.default, aten.sqrt.default),
)
_MOST_LEFT = 0.75
"""Operators below this ratio stay float. The time in float has the conversions around it."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def unfold_biases(gm: GraphModule) -> PassResult:
    """Give a convolution or linear its bias in float: the delegate makes the same integers of it.

    Before:  linear(dq(x_q), dq(w_q), dq(b_q))
    After:   linear(dq(x_q), dq(w_q), b), b the float values of b_q
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_dequantize(n)]:
        readers = [u for u in node.users if is_call(u, GEMMS) and bias_of(u) is node]
        source = node.args[0]
        if len(readers) == len(node.users) == 1 and isinstance(source, Node):
            if constant_of(gm, source) is not None:
                fold_dequantize(gm, editor, node)
                notes.append(Note(node.name, "the delegate makes the integer bias itself"))
    return PassResult(editor.finish(), tuple(notes))


def bias_of(node: Node) -> Any:
    """The bias of a convolution, linear or addmm: a node or None."""
    return argument(node, "self" if is_call(node, ADDMM) else "bias")


@graph_pass(needs=(HAS_VALUES,), gives=())
def leave_slower(gm: GraphModule) -> PassResult:
    """Mark operators whose integer kernels measured much slower than float ones here.

    They stay in the delegate, in float between their q/dq. A product whose weight is computed
    stays integers: the delegate has no float form of it. So do functions, which are look-ups in a
    table: XNNPACK makes tables of those between q/dq too, and of several in a row (ExecuTorch 1.4)
    frees memory twice.
    """
    notes = []
    for slower in chain(find_slower(gm, "xnnpack", most=_MOST_LEFT), large_kernels(gm)):
        node = slower.node
        weight = operands(node)[1] if is_call(node, GEMMS) else None
        if is_call(node, _FUNCTIONS):
            continue
        if weight is None or _is_constant(gm, weight):
            mark_fallback(node, Fallback.FLOAT)
            notes.append(slower.note)
    return PassResult(changed=False, notes=tuple(notes))


def _is_constant(gm: GraphModule, weight: Node) -> bool:
    source = weight.args[0] if is_dequantize(weight) else weight
    return isinstance(source, Node) and constant_of(gm, source) is not None


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
        is_left = fallback_of(node) and is_dequantize(weight)
        is_left = is_left and constant_of(gm, weight.args[0]) is not None
        if (reason is not None or is_left) and len(weight.users) == 1:
            fold_dequantize(gm, editor, weight)
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
    shape, made_shape = (view_shape(n.meta["val"].shape) for n in (x, conv))
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
                fold_dequantize(gm, editor, node)
                notes.append(Note(readers, reason))
        elif is_quantize(source) and (reason := _run_time_reason(gm, node)) is not None:
            if not any(fallback_of(reader) for reader in node.users):
                notes.append(Note(node.name, reason))
            editor.replace(node, editor.now(source.args[0]))  # type: ignore[arg-type]  # a node
            editor.discard([source, *_dynamic_qparams(source)])
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
    """True if all tensors of an operator are static int8."""
    inputs = [n for n in user.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return all(is_static_int8(n) for n in inputs) and gives_static_int8(user)


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_biases(gm: GraphModule) -> PassResult:
    """Add the bias behind each linear of float activations and an integer weight.

    ExecuTorch's serializer takes a bias there only where the activations are integers too.

    Before:  linear(x, dq(w_q), b)
    After:   linear(x, dq(w_q)) + b
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if not is_weight_only(node) or (bias := argument(node, "bias")) is None:
            continue
        x, weight = argument(node, "input"), argument(node, "weight")
        value = node.meta["val"]
        product = editor.call(aten.linear.default, x, weight, like=node, before=node, val=value)
        added = editor.call(aten.add.Tensor, product, bias, like=node, before=node, val=value)
        editor.replace(node, added)
        notes.append(Note(node.name, "its bias is added behind it"))
    return PassResult(editor.finish(), tuple(notes))


def has_per_tensor(gm: GraphModule) -> bool:
    """True if some linear reads activations quantized per tensor at run time."""
    return any(_feeds_linears(node) for node in gm.graph.nodes)


def _feeds_linears(node: Node) -> bool:
    if not is_quantize(node) or kind_of_qdq(node) is not QdqKind.PER_TENSOR_DYNAMIC:
        return False
    return all(is_call(reader, LINEAR) for dq in node.users for reader in dq.users)


@graph_pass(needs=(HAS_VALUES,), gives=())
def choose_per_row(gm: GraphModule) -> PassResult:
    """Find the qparams of each row, as XNNPACK does for linears whatever the graph says.

    What other quantizers annotate per tensor runs per row, which is nearer to float; here the
    graph is made to say what runs, so that the artifact can be held against it.

    Before:  q(x, *choose_qparams(x, -128, 127, eps, int8))
    After:   quantize_per_token(x, *choose_qparams_per_token_asymmetric(x, int8), …)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if _feeds_linears(n)]:
        scale, zero_point, low, high, dtype = node.args[1:6]
        picks = [scale, zero_point]
        chosen = scale.args[0] if isinstance(scale, Node) and scale.args else None
        if not isinstance(chosen, Node) or chosen.target not in CHOOSE_QPARAMS_OPS:
            continue
        x = node.args[0]
        both = editor.call(ChoosePerToken, x, dtype, like=node, before=node)
        rows = [
            editor.call(pick.target, both, pick.args[1], like=node, before=node) for pick in picks
        ]
        made = editor.call(QuantizePerToken, x, *rows, low, high, dtype, like=node, before=node)
        for dequantize in list(node.users):
            value = dequantize.meta["val"]
            back = editor.call(
                DequantizePerToken,
                made,
                *rows,
                low,
                high,
                dtype,
                value.dtype,
                like=dequantize,
                before=dequantize,
                val=value,
            )
            editor.replace(dequantize, back)
        editor.discard([*node.users, node, *(p for p in picks if isinstance(p, Node)), chosen])
        notes.append(Note(node.name, "the delegate finds the qparams of each row"))
    return PassResult(editor.finish(), tuple(notes))


_SEPARATOR = ", "


def float_regions(notes: Iterable[Note], work: GraphModule, gm: GraphModule) -> list[FloatRegion]:
    """One region for each note of a pass that put operators back to float.

    Args:
        notes: their nodes are names in `work`, separated by commas where there are several.
        work: the copy that the passes edited; its new operators have other names than in `gm`.
        gm: the canonical graph that was lowered; the regions name its nodes.
    """
    given = {node.name for node in gm.graph.nodes}
    written_for = {origin_name(node): node.name for node in gm.graph.nodes if not is_qdq(node)}
    names = {n.name: written_for.get(origin_name(n), n.name) for n in work.graph.nodes}
    found: dict[tuple[str, str], None] = {}
    for note in notes:
        told = [n if n in given else names.get(n, n) for n in note.node.split(_SEPARATOR)]
        found[_SEPARATOR.join(dict.fromkeys(told)), note.text] = None
    return [FloatRegion(node=node, what="runs in float", reason=text) for node, text in found]


def refuse_float(gm: GraphModule, regions: Sequence[FloatRegion]) -> None:
    """Refuse the lowering if there is a region in float.

    Raises:
        UnsupportedError: there is one; the error names the first.
    """
    for worst in regions[:1]:
        names = worst.node.split(_SEPARATOR)
        raise UnsupportedError(
            f"XNNPACK cannot keep {worst.node} quantized: {worst.reason}",
            node=next((n for n in gm.graph.nodes if n.name in names), None),
            fix="lower(..., strict=False) to run it in float",
        )

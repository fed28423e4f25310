"""Put back to float what the delegate would leave to ExecuTorch, and say so.

A dq that the delegate does not take runs as an operator of its own at every call; in front of a
convolution's weight it even returns wrong numbers (ExecuTorch 1.4). So every q/dq is checked here
against the form that the partitioner takes, and folded or dropped if it has another.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.between import sole_quantize
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_dequantize, is_quantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    ADDMM,
    CONV1D,
    CONV2D,
    CONV_TRANSPOSE1D,
    CONV_TRANSPOSE2D,
    HARDTANH,
    LINEAR,
    RELU,
    Family,
    argument,
    is_call,
)
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["GEMMS", "refloat_leftovers", "unfold_biases"]

GEMMS: Family = (*CONV1D, *CONV2D, *CONV_TRANSPOSE1D, *CONV_TRANSPOSE2D, *LINEAR, *ADDMM)
"""Operators whose weight the delegate takes as integers."""

_TRANSPOSED: Family = (*CONV_TRANSPOSE1D, *CONV_TRANSPOSE2D)


@graph_pass()
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


@graph_pass()
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
            reason = _constant_reason(node)
            if reason is not None:
                readers = ", ".join(u.name for u in node.users)
                _fold(gm, editor, node)
                notes.append(Note(readers, reason))
        elif not _is_static_int8(node):
            if not is_quantize(source):
                continue
            editor.replace(node, editor.now(source.args[0]))  # type: ignore[arg-type]  # a node
            editor.discard([source])
            notes.append(Note(node.name, "the delegate takes static per-tensor int8 alone"))
    return PassResult(editor.finish(), tuple(notes))


def _is_static_int8(node: Node) -> bool:
    return node.target in (DequantizePerTensor, QuantizePerTensor) and node.args[5] is torch.int8


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


def _constant_reason(node: Node) -> str | None:
    """Why the delegate would not take a constant's dq where it stands; None if it does."""
    users = list(node.users)
    if len(users) != 1:
        return "its integers have several readers"
    user = users[0]
    if not is_call(user, GEMMS):
        return None if _is_static_int8(node) and _is_integer_op(user) else "it has no integer form"
    names = ("mat1", "mat2") if is_call(user, ADDMM) else ("input", "weight")
    act, weight = (argument(user, name) for name in names)
    if weight is not node:
        return "it is no weight of this operator"
    checks: tuple[tuple[Callable[[], bool], str], ...] = (
        (lambda: isinstance(act, Node) and _is_static_int8(act), "its input is not static int8"),
        (lambda: _has_int8_output(user), "its output is not static int8"),
        (lambda: node.args[-1] is torch.int8, "its weight is not int8"),
        (lambda: _axis_fits(node, user), "its scales are not one per output channel"),
    )
    return next((reason for holds, reason in checks if not holds()), None)


def _has_int8_output(node: Node) -> bool:
    users = list(node.users)
    if len(users) == 1 and is_call(users[0], (*RELU, *HARDTANH)):
        node = users[0]
    quantize = sole_quantize(node)
    return quantize is not None and _is_static_int8(quantize)


def _axis_fits(dequantize: Node, user: Node) -> bool:
    if dequantize.target is DequantizePerTensor:
        return bool(dequantize.args[2] == 0)
    axis = dequantize.args[3]
    if is_call(user, _TRANSPOSED):
        return bool(axis == 1 and argument(user, "groups") == 1)
    return bool(axis == (1 if is_call(user, ADDMM) else 0))


def _is_integer_op(user: Node) -> bool:
    """Whether all tensors of an operator are static int8."""
    inputs = [n for n in user.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    return all(_is_static_int8(n) for n in inputs) and _has_int8_output(user)

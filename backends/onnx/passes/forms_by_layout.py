"""Operators in the layout of what is beside them."""

from collections.abc import Collection

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import fallback_of
from pt2e_quant.backends.target.in_float import behind_clips, computed_reads, real_of
from pt2e_quant.backends.target.layouts import layouts
from pt2e_quant.backends.target.leave_slower import is_marked_slower
from pt2e_quant.backends.target.requantize_between import sole_quantize
from pt2e_quant.backends.target.select_nearest import selected_nearest
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.ops import (
    ADD,
    CONV2D,
    MUL,
    RESIZE_NEAREST,
    argument,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.passes.batch_norm.fold_affines import ChannelOperands, channel_operands

_IMAGE_DIMS = 4


@graph_pass(needs=(HAS_VALUES,), gives=())
def affines_as_norms(gm: GraphModule) -> PassResult:
    """Write x * scale + shift per channel as a batch norm with mean 0 and variance 1.

    ONNX Runtime computes it as a convolution in the layout of the float convolutions beside it,
    with a residual in the same pass; for a product and a sum it changes the layout. Between
    integer convolutions both keep the layout, and the batch norm does not.

    Before:  y = add(mul(x[N, C, H, W], scale[C, 1, 1]), shift[C, 1, 1])
    After:   y = batch_norm(x, scale, shift, zeros, ones, eps=0)
    """
    editor, notes = Editor(gm), []
    constants = constant_nodes(gm.graph)
    beside = _beside_float_convs(gm)
    products = [n for n in gm.graph.nodes if n in beside and is_call(n, MUL) and len(n.users) == 1]
    for node in products:
        reader = next(iter(node.users))
        is_sum = is_call(reader, ADD) and argument(reader, "alpha") == 1
        product = _operands(gm, node, constants) if is_sum else None
        added = _operands(gm, reader, constants) if product is not None else None
        if product is None or added is None:
            continue
        zeros, ones = torch.zeros_like(product.values), torch.ones_like(product.values)
        tensors = {
            f"{node.name}_scale": product.values.clone(),
            f"{node.name}_shift": added.values.clone(),
            f"{node.name}_mean": zeros,
            f"{node.name}_variance": ones,
        }
        stored = [editor.constant(name, tensor, like=node) for name, tensor in tensors.items()]
        options = False, 0.0, 0.0, True  # not training; momentum, eps, cuDNN
        made = editor.call(
            aten.batch_norm.default, product.x, *stored, *options, like=reader, before=reader
        )
        editor.replace(reader, made)
        notes.append(Note(node.name, "a batch norm"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _beside_float_convs(gm: GraphModule) -> set[Node]:
    """The float operators that share the layout of a convolution in float."""
    integers = {n for n in gm.graph.nodes if computed_reads(gm, n) and not is_marked_slower(n)}
    found: set[Node] = set()
    for layout in layouts(gm, integers):
        if not integers.issuperset(layout.convs):
            found |= layout.operators
    return found


def _operands(gm: GraphModule, node: Node, constants: Collection[Node]) -> ChannelOperands | None:
    """The operands of a product or sum that has a constant for each of several channels."""
    found = channel_operands(gm, node, 1, constants)
    return found if found is not None and found.values.numel() > 1 else None


@graph_pass(needs=(HAS_VALUES,), gives=())
def select_nearest(gm: GraphModule) -> PassResult:
    """Write a nearest resize of integers as selections along each axis; see `selected_nearest`.

    ONNX Runtime keeps images with channels last behind integer convolutions, where its Resize
    computes the place of each element; a Gather copies pixels and rows whole. The permutes go into
    those of the convolutions around. With channels first its Resize is the faster one.
    """

    def selected(m: Match, editor: Editor) -> Node | Skip:
        why = _why_not(gm, m.node("x"), m.anchor)
        return selected_nearest(m, editor) if why is None else Skip(why)

    return rewrite(gm, (Rule("nearest", find=Op(RESIZE_NEAREST, Var("x")), build=selected),))


def _why_not(gm: GraphModule, x: Node, node: Node) -> str | None:
    """Why a resize is left, None if it is one of integers with channels last."""
    if x.meta["val"].dim() != _IMAGE_DIMS or fallback_of(node) or is_marked_slower(node):
        return "it is none of integers of images"
    real = real_of(x) if is_dequantize(x) else None
    if real is None or sole_quantize(node) is None:
        return "it is not between integers"
    source = behind_clips(gm, real)
    is_last = is_call(source, (*CONV2D, *ADD)) and computed_reads(gm, source)
    return None if is_last and not is_marked_slower(source) else "its channels are first"


FORMS_BY_LAYOUT = (affines_as_norms, select_nearest)

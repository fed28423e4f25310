"""Operators written as convolutions and products, which the delegate has kernels for.

It has none for means, selections and shared key heads. ExecuTorch writes a conv1d as a conv2d
between two reshapes inside of the delegate, and fails on them where both the batch and the length
are dynamic: a reshape there takes one. The delegate has no average pools in integers either.
"""

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view, view_shape
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.shared_heads import read_shared_heads
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    CAT,
    CONV1D,
    CONV_TRANSPOSE1D,
    HARDTANH,
    IDENTITIES,
    MATMUL,
    MEAN,
    RELU,
    RESHAPE,
    SLICE,
    STACK,
    argument,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
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


_WIDEST = 512
"""A matrix of more columns would cost more than the slices that it saves."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Every n-th value of a range of the last axis of a tensor, negated or not."""

    source: Node
    values: slice
    sign: float

    def rows(self) -> Tensor:
        """The rows of a matrix that selects it: float32[values, width]."""
        return self.sign * torch.eye(self.source.meta["val"].shape[-1])[self.values]


@graph_pass(needs=(HAS_VALUES,), gives=())
def selections_as_products(gm: GraphModule) -> PassResult:
    """Write joined slices of one tensor's last axis that have a step as a linear.

    Rotary embeddings rotate pairs so. XNNPACK slices neighbours alone, and a slice outside cuts
    the delegate; a small product stays inside. Values are the same to the last bit: each sum has
    one term that is not 0 (infinities become NaN).

    Before:  view(stack([neg(slice(x, -1, 1, 32, 2)), slice(x, -1, 0, 32, 2)], -1), [2, 32])
    After:   linear(x, rows), rows [32, 32] of 0, 1 and -1
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, CAT + RESHAPE)]:
        parts = _parts(node) if is_call(node, CAT) else _pairs(node)
        if parts is None:
            continue
        source = parts[0].source
        rows = [part.rows() for part in parts]
        matrix = torch.cat(rows) if is_call(node, CAT) else torch.stack(rows, 1).flatten(0, 1)
        weight = editor.constant(f"{node.name}_rows", matrix, like=node)
        editor.replace(
            node, editor.call(aten.linear.default, source, weight, like=node, before=node)
        )
        inputs = node.all_input_nodes
        editor.discard([node, *inputs, *(i for n in inputs for i in n.all_input_nodes)])
        notes.append(Note(node.name, f"{len(parts)} parts of {source.name} as a product"))
    return PassResult(editor.finish(), tuple(notes))


def _pairs(view: Node) -> list[_Part] | None:
    """The parts that a stack interleaves in front of a view that makes them one axis."""
    stack = view.all_input_nodes[0]
    while is_call(stack, IDENTITIES) and len(stack.users) == 1:  # a copy that the view needs
        stack = stack.all_input_nodes[0]
    if not is_call(stack, STACK) or len(stack.users) > 1:
        return None
    parts = _parts(stack)
    if parts is None:
        return None
    *ahead, _ = parts[0].source.meta["val"].shape
    *first, width = view.meta["val"].shape
    counts = [len(part.rows()) for part in parts]
    return parts if str(first) == str(ahead) and width == sum(counts) else None


def _parts(join: Node) -> list[_Part] | None:
    """The parts of one float32 tensor that a cat or stack joins in the last axis.

    None where the delegate has slices for them: where none has a step.
    """
    value, tensors = join.meta["val"], argument(join, "tensors")
    if argument(join, "dim") % value.dim() != value.dim() - 1 or value.dtype is not torch.float32:
        return None
    parts = [_part(t) for t in tensors]
    found = [p for p in parts if p is not None]
    if len(found) < len(parts) or all(p.values.step == 1 for p in found):
        return None
    source = found[0].source
    if any(p.source is not source for p in found):
        return None
    return found if source.meta["val"].shape[-1] <= _WIDEST else None


def _part(node: Node) -> _Part | None:
    """A part of the last axis, whose size is known."""
    sign = 1.0
    if is_call(node, (aten.neg.default,)):
        inner = node.args[0]
        assert isinstance(inner, Node)
        node, sign = inner, -1.0
    start, stop, step = 0, None, 1
    if is_call(node, SLICE):
        rank = node.meta["val"].dim()
        if argument(node, "dim") % rank != rank - 1:
            return None
        start, stop = argument(node, "start") or 0, argument(node, "end")
        step = argument(node, "step")
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    if not isinstance(start, int) or not (stop is None or isinstance(stop, int)):
        return None
    first, last, step = slice(start, stop, step).indices(value.shape[-1])
    return _Part(node, slice(first, last, step), sign) if first < last else None


@graph_pass(needs=(HAS_VALUES,), gives=())
def group_heads(gm: GraphModule) -> PassResult:
    """Multiply all the heads that share a matrix as the rows of one product.

    Repeating keys and values copies the whole cache at each token, outside of the delegate.

    Before:  matmul(q, repeat(k)),            q: [N, H * R, S, D], k: [N, H, D, T]
    After:   bmm(q.view(N * H, R * S, D), k.view(N * H, D, T)).view(N, H * R, S, T)
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, MATMUL)]:
        left, right = node.args[:2]
        shared = read_shared_heads(right) if isinstance(right, Node) else None
        if shared is None or not isinstance(left, Node) or not shared.has_reader(left):
            continue
        heads = math.prod(shared.source.meta["val"].shape[:2])
        rows, back = left.meta["val"].shape, view_shape(node.meta["val"].shape)
        if str(rows[0]) != str(shared.source.meta["val"].shape[0]):
            continue  # one matrix for several samples
        depth = view_shape(shared.source.meta["val"].shape)
        if back is None or depth is None or not all(isinstance(s, int) for s in (heads, rows[3])):
            continue
        stacked = rows[2] * shared.repeats if isinstance(rows[2], int) else -1
        editor.cursor = node
        flat = view(editor, left, [heads, stacked, rows[3]], node)
        matrix = view(editor, shared.source, [heads, *depth[2:]], node)
        if shared.is_turned:
            matrix = editor.call(aten.transpose.int, matrix, -2, -1, like=node)
        product = editor.call(aten.bmm.default, flat, matrix, like=node)
        # In two steps: torch's fake views find no proof for the one that regroups a dynamic size.
        apart = [heads, shared.repeats, *back[2:]]
        split = editor.call(aten.view.default, product, apart, like=node)
        whole = editor.call(aten.view.default, split, back, like=node, val=node.meta["val"])
        editor.replace(node, whole)
        editor.discard([node, *shared.between])
        notes.append(Note(node.name, f"{shared.repeats} heads share each of {heads} matrices"))
    editor.cursor = None
    return PassResult(editor.finish(), tuple(notes))


_CONVS = (*CONV1D, *CONV_TRANSPOSE1D)


@graph_pass(needs=(HAS_VALUES,), gives=())
def conv1d_as_conv2d(gm: GraphModule) -> PassResult:
    """Write a conv1d of two dynamic sizes as a conv2d with a last size of 1; transposed ones too.

    Also those that share a weight: ExecuTorch (1.4) gives it a last size once for each of them.

    Before:  q(conv1d(dq(x_q), dq(w_q), b))
    After:   q(flatten(dq(q(conv2d(dq(q(unflatten(dq(x_q), -1, [-1, 1]))), dq(w_q_2d), b))), -2))

    `move_integers` then takes both reshapes on the integers, outside of the delegate, where
    ExecuTorch makes them views. Between two such convolutions none is left.
    """
    editor = Editor(gm)
    notes = []
    images: dict[Node, Node] = {}
    widened: dict[Node, Node] = {}
    convs = [n for n in gm.graph.nodes if is_call(n, _CONVS)]
    readers = Counter(_held(conv) for conv in convs)
    for conv in convs:
        weight, held = argument(conv, "weight"), _held(conv)
        value = constant_of(gm, held)
        if value is None or not (readers[held] > 1 or _has_two_dynamic_sizes(conv)):
            continue
        if len(conv.meta["val"].shape) != 3:
            continue
        if held not in widened:
            plane = value.detach().unsqueeze(-1)
            widened[held] = editor.constant(f"{held.target}_2d", plane, like=held)
        wide = widened[held]
        if held is not weight:
            wide = editor.call(weight.target, wide, *weight.args[1:], like=weight, before=conv)
        _widen(editor, conv, wide, images)
        notes.append(Note(conv.name, "conv1d -> conv2d"))
    return PassResult(editor.finish(), tuple(notes))


def _held(conv: Node) -> Node:
    """The constant behind a convolution's weight."""
    weight: Any = argument(conv, "weight")
    held: Node = weight.args[0] if is_dequantize(weight) else weight
    return held


def _has_two_dynamic_sizes(conv: Node) -> bool:
    return sum(not isinstance(size, int) for size in conv.meta["val"].shape) > 1


def _widen(editor: Editor, conv: Node, weight: Node, images: dict[Node, Node]) -> None:
    """Put a conv2d with reshapes around it in the place of a conv1d, with the clip behind it.

    Args:
        editor: inserts the calls.
        conv: the conv1d.
        weight: of the conv2d.
        images: what the conv2ds made so far give, by what takes the place of the conv1ds.
    """
    x = argument(conv, "input")
    image = _image(editor, x, conv, images)
    made = _conv2d(editor, conv, image, weight)
    last = conv
    clip = _sole_reader(conv)
    if clip is not None and is_call(clip, (*RELU, *HARDTANH)):
        made = editor.call(clip.target, made, *clip.args[1:], like=clip, before=clip)
        last = clip
    quantize = _sole_reader(last)
    if quantize is not None and quantize.target is QuantizePerTensor:
        made = _again(editor, made, quantize.args[1:], last)
    flat = editor.call(aten.flatten.using_ints, made, -2, -1, like=last, before=last)
    editor.replace(last, flat)
    images[flat] = made
    editor.discard([last, conv, x])


def _sole_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _conv2d(editor: Editor, conv: Node, image: Node, weight: Node) -> Node:
    """The conv2d of a conv1d's arguments, each with that of a last size of 1."""
    bias, groups = argument(conv, "bias"), argument(conv, "groups")
    stride, dilation = (_pair(argument(conv, name), 1) for name in ("stride", "dilation"))
    padding = argument(conv, "padding")
    args: tuple[Any, ...] = (image, weight, bias, stride)
    if is_call(conv, CONV_TRANSPOSE1D):
        more = _pair(argument(conv, "output_padding"), 0)
        args = (*args, _pair(padding, 0), more, groups, dilation)
        return editor.call(aten.conv_transpose2d.input, *args, like=conv, before=conv)
    if isinstance(padding, str):
        args = (*args, padding, dilation, groups)
        return editor.call(aten.conv2d.padding, *args, like=conv, before=conv)
    args = (*args, _pair(padding, 0), dilation, groups)
    return editor.call(aten.conv2d.default, *args, like=conv, before=conv)


def _image(editor: Editor, x: Node, conv: Node, images: dict[Node, Node]) -> Node:
    """The input of a conv1d with a last size of 1, as the conv2d before it gives it if one does."""
    if x.target is not DequantizePerTensor:
        return images.get(x) or _open(editor, x, conv)
    quantize = x.args[0]
    assert isinstance(quantize, Node)
    made = images.get(quantize.args[0]) if quantize.target is QuantizePerTensor else None  # type: ignore[arg-type]  # a quantize reads a node
    if made is None or made.args[1:] != x.args[1:]:
        return _again(editor, _open(editor, x, conv), x.args[1:], conv)
    return editor.call(DequantizePerTensor, *made.args, like=conv, before=conv)


def _open(editor: Editor, x: Node, conv: Node) -> Node:
    return editor.call(aten.unflatten.int, x, -1, [-1, 1], like=conv, before=conv)


def _again(editor: Editor, x: Node, qparams: Any, at: Node) -> Node:
    """A value behind a q and a dq of its own, before a node and in its name."""
    stored = editor.call(QuantizePerTensor, x, *qparams, like=at, before=at)
    return editor.call(DequantizePerTensor, stored, *qparams, like=at, before=at)


def _pair(sizes: Any, other: int) -> list[int]:
    first: int = sizes if isinstance(sizes, int) else sizes[0]
    return [first, other]

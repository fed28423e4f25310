"""Concatenated slices of one tensor as a product with a constant matrix of 0, 1 and -1."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import CAT, SLICE, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_WIDEST = 512
"""A matrix of more columns would cost more than the slices that it saves."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A range of the last axis of a tensor, negated or not."""

    source: Node
    start: int
    stop: int
    sign: float


@graph_pass(needs=(HAS_VALUES,), gives=())
def selections_as_products(gm: GraphModule) -> PassResult:
    """Write cat over slices of one tensor's last axis as a linear, where sizes are dynamic.

    Rotary embeddings rotate halves so. XNNPACK's slices take no dynamic sizes, and each one left
    outside cuts the delegate; a small product stays inside. Values are the same to the last bit:
    each sum has one term that is not 0 (infinities become NaN).

    Before:  cat([neg(slice(x, -1, 16, 32)), slice(x, -1, 0, 16)], -1)
    After:   linear(x, rows), rows [32, 32] of 0, 1 and -1
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, CAT)]:
        parts = _parts(node)
        if parts is None:
            continue
        source = parts[0].source
        width = source.meta["val"].shape[-1]
        rows = torch.cat([p.sign * torch.eye(width)[p.start : p.stop] for p in parts])
        weight = editor.constant(f"{node.name}_rows", rows, like=node)
        editor.replace(
            node, editor.call(aten.linear.default, source, weight, like=node, before=node)
        )
        inputs = node.all_input_nodes
        editor.discard([node, *inputs, *(i for n in inputs for i in n.all_input_nodes)])
        notes.append(Note(node.name, f"{len(parts)} parts of {source.name} as a product"))
    return PassResult(editor.finish(), tuple(notes))


def _parts(node: Node) -> list[_Part] | None:
    """What a cat joins, if it joins parts of one float32 tensor with a dynamic size."""
    value = node.meta["val"]
    tensors = argument(node, "tensors")
    if argument(node, "dim") % value.dim() != value.dim() - 1 or value.dtype is not torch.float32:
        return None
    parts = [_part(t) for t in tensors]
    if any(p is None for p in parts):
        return None
    found = [p for p in parts if p is not None]
    source = found[0].source
    shape = source.meta["val"].shape
    if any(p.source is not source for p in found) or all(isinstance(s, int) for s in shape):
        return None
    return found if shape[-1] <= _WIDEST else None


def _part(node: Node) -> _Part | None:
    """A part of the last axis, whose size is known."""
    sign = 1.0
    if is_call(node, (aten.neg.default,)):
        inner = node.args[0]
        assert isinstance(inner, Node)
        node, sign = inner, -1.0
    start, stop = 0, None
    if is_call(node, SLICE):
        rank = node.meta["val"].dim()
        if argument(node, "dim") % rank != rank - 1 or argument(node, "step") != 1:
            return None
        start, stop = argument(node, "start") or 0, argument(node, "end")
        source = node.args[0]
        assert isinstance(source, Node)
        node = source
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2 or not isinstance(value.shape[-1], int):
        return None
    if not isinstance(start, int) or not (stop is None or isinstance(stop, int)):
        return None
    first, last, _ = slice(start, stop).indices(value.shape[-1])
    return _Part(node, first, last, sign) if first < last else None

"""Attention whose query heads share key heads, without copying the keys for each of them."""

import math
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view, view_shape
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import EXPAND, MATMUL, RESHAPE, UNSQUEEZE, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["group_heads"]


@dataclass(frozen=True, slots=True)
class _Shared:
    """A matrix for each shared head, and how many heads read each."""

    source: Node
    repeats: int
    is_turned: bool
    between: tuple[Node, ...]


@graph_pass()
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
        shared = _shared(right) if isinstance(right, Node) else None
        if shared is None or not isinstance(left, Node):
            continue
        heads = math.prod(shared.source.meta["val"].shape[:2])
        rows, back = left.meta["val"].shape, view_shape(node.meta["val"])
        depth = view_shape(shared.source.meta["val"])
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


def _shared(node: Node) -> _Shared | None:
    """The matrices behind `repeat_kv`: unsqueeze, expand, reshape, and maybe a transpose."""
    between = [node]
    is_turned = False
    if node.target is aten.transpose.int and {a % 4 for a in _axes(node)} == {2, 3}:
        is_turned = True
        node = _input(node)
        between.append(node)
    if not is_call(node, RESHAPE) or node.meta["val"].dim() != 4:
        return None
    wide = _input(node)
    if not is_call(wide, EXPAND) or wide.meta["val"].dim() != 5:
        return None
    apart = _input(wide)
    if not is_call(apart, UNSQUEEZE) or apart.meta["val"].dim() != 5:
        return None
    source = _input(apart)
    value, expanded = source.meta["val"], wide.meta["val"].shape
    if not isinstance(value, Tensor) or value.dim() != 4 or apart.meta["val"].shape[2] != 1:
        return None
    repeats, heads = expanded[2], value.shape[1]
    if not isinstance(repeats, int) or not isinstance(heads, int):
        return None
    same = [str(expanded[i]) for i in (0, 1, 3, 4)] == [str(s) for s in value.shape]
    joined = node.meta["val"].shape[1] == repeats * heads
    if repeats < 2 or not same or not joined:
        return None
    return _Shared(source, repeats, is_turned, (*between, wide, apart))


def _axes(node: Node) -> tuple[int, int]:
    return node.args[1], node.args[2]  # type: ignore[return-value]  # integers by schema


def _input(node: Node) -> Node:
    found = node.args[0]
    assert isinstance(found, Node)
    return found

"""Attention whose query heads share key heads, without copying the keys for each of them."""

import math

from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view, view_shape
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.shared_heads import read_shared_heads
from pt2e_quant.graph.ops import MATMUL, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


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

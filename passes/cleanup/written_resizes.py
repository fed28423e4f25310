"""Upsampling that a model writes out by repeating rows and columns, as the operator that it is."""

from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import EXPAND, RESHAPE, SLICE, UNSQUEEZE, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_REPEAT = (aten.repeat_interleave.self_int,)
_COPIES = (aten.contiguous.default, aten.clone.default)
_IMAGE = 4
_VIEWS = (*UNSQUEEZE, *RESHAPE, *SLICE)
"""What may stand between an image and its expand; shapes say whether it only adds axes."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_resizes(gm: GraphModule) -> PassResult:
    """Call nearest upsampling where a model repeats pixels itself.

    Before:  reshape(expand(x[:, :, :, None, :, None], [N, C, H, 2, W, 2]), [N, C, 2 H, 2 W])
             repeat_interleave(repeat_interleave(x, 2, 2), 2, 3)
    After:   upsample_nearest2d(x, None, [2.0, 2.0])
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, (*RESHAPE, *_REPEAT))]:
        found = _of_repeats(node) if is_call(node, _REPEAT) else _of_expand(node)
        if found is None:
            continue
        x, factors = found
        target, scales = aten.upsample_nearest2d.vec, [float(factor) for factor in factors]
        made = editor.call(target, x, None, scales, like=node, val=node.meta["val"])
        editor.replace(node, made)
        notes.append(Note(node.name, f"is written out: {target}"))
    return PassResult(editor.finish(), tuple(notes))


def _of_repeats(node: Node) -> tuple[Node, list[int]] | None:
    """An image that repeats rows and columns, one call for each."""
    inner: Any = node.args[0]
    if not is_call(inner, _REPEAT):
        return None
    x: Any = inner.args[0]
    shape = x.meta["val"].shape
    dims = [argument(n, "dim") for n in (inner, node)]
    if len(shape) != _IMAGE or None in dims or {d % _IMAGE for d in dims} != {2, 3}:
        return None
    repeats = {d % _IMAGE: argument(n, "repeats") for d, n in zip(dims, (inner, node), strict=True)}
    return (x, [repeats[2], repeats[3]]) if _is_static(shape[2:]) else None


def _of_expand(node: Node) -> tuple[Node, list[int]] | None:
    """An image whose pixels are expanded to blocks of their own axes, and joined with these."""
    expand = node.args[0]
    while isinstance(expand, Node) and is_call(expand, _COPIES):
        expand = expand.args[0]
    if not isinstance(expand, Node) or not is_call(expand, EXPAND):
        return None
    x: Any = expand.args[0]
    before, behind = (n.meta["val"].shape for n in (x, expand))
    while isinstance(x, Node) and is_call(x, _VIEWS) and x.meta["val"].dim() > _IMAGE:
        x = x.args[0]
    if not isinstance(x, Node) or len(behind) != _IMAGE + 2:
        return None
    shape = x.meta["val"].shape
    if len(shape) != _IMAGE or not _is_static([*shape[2:], *behind[2:]]):
        return None
    batch, channels, height, width = shape
    rows, columns = behind[3], behind[5]
    wanted = (
        [batch, channels, height, 1, width, 1],
        [batch, channels, height, rows, width, columns],
        [batch, channels, height * rows, width * columns],
    )
    found = (before, behind, node.meta["val"].shape)
    same = all(str([*a]) == str(b) for a, b in zip(found, wanted, strict=True))
    return (x, [rows, columns]) if same else None


def _is_static(sizes: Any) -> bool:
    return all(isinstance(size, int) for size in sizes)

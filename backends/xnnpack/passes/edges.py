"""Pads with values of their own input, which the delegate has as slices that are joined."""

from collections.abc import Sequence

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import is_left_plain
from pt2e_quant.backends.target.requantize_between import between, own_dequantize
from pt2e_quant.backends.xnnpack.conditions import pads_by_slices
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import argument, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_MOST_JOINED = 5
"""Tensors that the delegate joins in one operator."""
_Rows = tuple[int, int]


@graph_pass(needs=(HAS_VALUES,), gives=())
def edges_as_slices(gm: GraphModule) -> PassResult:
    """Write pads that reflect, repeat or continue their input as slices of it, joined.

    ExecuTorch writes them as an index, which it computes element by element outside the delegate.

    Before:  q(pad(dq(x_q), [1, 1], "reflect"))
    After:   q(cat([dq(q(slice(dq(x_q), -1, 1, 2))), dq(x_q), dq(q(slice(dq(x_q), -1, -2, -1)))]))
    """
    editor = Editor(gm)
    notes = []
    for pad in [n for n in gm.graph.nodes if pads_by_slices(n) and not is_left_plain(n)]:
        editor.replace(pad, _padded(editor, pad))
        notes.append(Note(pad.name, "pad -> cat of slices"))
    return PassResult(editor.finish(), tuple(notes))


def _padded(editor: Editor, pad: Node) -> Node:
    x, pads, mode = pad.all_input_nodes[0], argument(pad, "pad"), argument(pad, "mode")
    last = x.meta["val"].dim() - 1
    for at, (before, behind) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        if before or behind:
            dim = last - at
            front, back = _rows(mode, x.meta["val"].shape[dim], before, behind)
            parts = [_joined(editor, pad, x, dim, rows) for rows in (front, back)]
            editor.discard([x])
            x = _cat(editor, pad, [*parts[0], own_dequantize(editor, x), *parts[1]], dim)
            x = between(editor, x, pad) if any(pads[2 * at + 2 :]) else x
    return x


def _rows(mode: str, size: int, before: int, behind: int) -> tuple[list[_Rows], list[_Rows]]:
    """The first row of the input and the one behind the last, of each slice in front and behind."""
    if mode == "circular":
        return [(size - before, size)] if before else [], [(0, behind)] if behind else []
    if mode == "replicate":
        return [(0, 1)] * before, [(size - 1, size)] * behind
    front, back = range(before, 0, -1), range(size - 2, size - 2 - behind, -1)
    return [(at, at + 1) for at in front], [(at, at + 1) for at in back]


def _joined(editor: Editor, pad: Node, x: Node, dim: int, rows: Sequence[_Rows]) -> list[Node]:
    """One tensor of all slices, or none, so that the whole input is copied once."""
    parts = []
    for start, stop in rows:
        own = own_dequantize(editor, x)
        part = editor.call(aten.slice.Tensor, own, dim, start, stop, like=pad)
        parts.append(between(editor, part, pad))
    while len(parts) > 1:
        parts = [
            between(editor, _cat(editor, pad, parts[at : at + _MOST_JOINED], dim), pad)
            for at in range(0, len(parts), _MOST_JOINED)
        ]
    return parts


def _cat(editor: Editor, pad: Node, parts: Sequence[Node], dim: int) -> Node:
    return editor.call(aten.cat.default, list(parts), dim, like=pad) if len(parts) > 1 else parts[0]

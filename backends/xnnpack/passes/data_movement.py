"""Operators that only move data, on the integers where the delegate has none of its own.

Between a dq and a q of equal qparams, moving the integers gives the same result and a quarter of
the bytes, and no dq or q is left over for ExecuTorch to run.
"""

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.backends.target.float_retries import fallback_of, is_left_plain
from pt2e_quant.backends.target.requantize_between import between, own_dequantize, sole_quantize
from pt2e_quant.backends.xnnpack.conditions import pads_by_slices, slices_neighbours
from pt2e_quant.backends.xnnpack.gemm_rows import CLIPS
from pt2e_quant.backends.xnnpack.passes.normalize_overloads import view_shape
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import (
    CAT,
    EXPAND,
    IDENTITIES,
    MAX_POOL2D,
    PAD,
    PERMUTE,
    RESHAPE,
    RESIZE_NEAREST,
    SELECT,
    SLICE,
    SPLIT,
    SQUEEZE,
    STACK,
    UNSQUEEZE,
    Overloads,
    argument,
    aten,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite

SHUFFLES: Overloads = (
    aten.channel_shuffle.default,
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
)
MOVED_AS_INTEGERS: Overloads = (
    *EXPAND,
    *IDENTITIES,
    *RESHAPE,
    *SELECT,
    *SLICE,
    *SPLIT,
    *STACK,
    *RESIZE_NEAREST,
    *SHUFFLES,
    aten.flip.default,
    aten.index_select.default,
    aten.repeat.default,
    aten.roll.default,
)
"""Moved by ExecuTorch's own operators on int8 where the delegate has none of its own."""


DATA_MOVEMENT: Overloads = (*MOVED_AS_INTEGERS, *PERMUTE, *SQUEEZE, *UNSQUEEZE, *PAD, *MAX_POOL2D)
"""Whose result has the integers that it reads: the delegate refuses to load other qparams there."""

JOINS: Overloads = (*CAT, *STACK)
"""Whose result has the integers of all that they read."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def requantize_behind_moves(gm: GraphModule) -> PassResult:
    """Give what data movement returns the qparams of what it reads, and quantize anew behind it.

    Before:  q(permute(dq(x_q, A)), B)
    After:   q(dq(q(permute(dq(x_q, A)), A), A), B)
    """
    editor = Editor(gm)
    notes = []
    for quantize in [n for n in gm.graph.nodes if n.target is QuantizePerTensor]:
        move = quantize.args[0]
        read = move.args[0] if is_call(move, DATA_MOVEMENT) else None
        if not isinstance(read, Node) or read.target is not DequantizePerTensor:
            continue
        if fallback_of(move) or read.args[1:] == quantize.args[1:] or len(move.users) > 1:
            continue
        stored = editor.call(QuantizePerTensor, move, *read.args[1:], like=move, before=quantize)
        value = editor.call(DequantizePerTensor, stored, *read.args[1:], like=move, before=quantize)
        quantize.replace_input_with(move, value)
        editor.changed = True
        notes.append(Note(move.name, "its result is quantized anew: it keeps its input's qparams"))
    return PassResult(editor.finish(), tuple(notes))


@graph_pass(needs=(HAS_VALUES,), gives=())
def requantize_before_joins(gm: GraphModule) -> PassResult:
    """Give all that a cat or stack reads the qparams of its result: the delegate joins no others.

    Before:  q(cat([dq(x_q, A), dq(y_q, B)]), C)
    After:   q(cat([dq(q(dq(x_q, A), C), C), dq(q(dq(y_q, B), C), C)]), C)
    """
    editor = Editor(gm)
    notes = []
    for quantize in [n for n in gm.graph.nodes if n.target is QuantizePerTensor]:
        join = quantize.args[0]
        if not is_call(join, JOINS) or fallback_of(join) or len(join.users) > 1:
            continue
        to = quantize.args[1:]
        parts: Any = argument(join, "tensors")
        read = [part for part in parts if part.target is DequantizePerTensor]
        if not read or all(part.args[1:] == to for part in parts):
            continue
        made = []
        for part in parts:
            if part.target is DequantizePerTensor and part.args[1:] == to:
                made.append(part)
                continue
            stored = editor.call(QuantizePerTensor, part, *to, like=join, before=join)
            made.append(editor.call(DequantizePerTensor, stored, *to, like=join, before=join))
        join.args = (made, *join.args[1:])
        editor.changed = True
        notes.append(Note(join.name, "what it joins is quantized anew, by its result's qparams"))
    return PassResult(editor.finish(), tuple(notes))


def _clipped(m: Match, editor: Editor) -> Node | Skip:
    quantize, clip, pool, x = m.anchor, m.node("clip"), m.node("pool"), m.node("x")
    if x.target is not DequantizePerTensor or fallback_of(clip) or fallback_of(pool):
        return Skip("one of them stays float")
    qparams = quantize.args[1:]
    if qparams == m.node("stored").args[1:]:
        return Skip("both have the same qparams")
    if len(clip.all_input_nodes) > 1:
        return Skip("its limits are computed at run time")
    clip_kwargs: Any = clip.kwargs
    pool_kwargs: Any = pool.kwargs
    made = editor.call(clip.target, x, *clip.args[1:], like=clip, **clip_kwargs)
    stored = editor.call(QuantizePerTensor, made, *qparams, like=clip)
    value = editor.call(DequantizePerTensor, stored, *qparams, like=clip)
    made = editor.call(pool.target, value, *pool.args[1:], like=pool, **pool_kwargs)
    return editor.call(QuantizePerTensor, made, *qparams, like=pool)


_STORED = Op(QuantizePerTensor, Op(aten.max_pool2d.default, Var("x"), name="pool"), name="stored")
_CLIPPED_POOL = Op(QuantizePerTensor, Op(CLIPS, Op(DequantizePerTensor, _STORED), name="clip"))


@graph_pass(needs=(HAS_VALUES,), gives=())
def clip_before_pools(gm: GraphModule) -> PassResult:
    """Clip in front of a max_pool2d, which gives the same integers, where the clip has qparams.

    XNNPACK makes one operator of a pool and a clip behind it, which does not requantize.

    Before:  q(relu(dq(q(max_pool2d(dq(x_q, A)), A), A)), B)
    After:   q(max_pool2d(dq(q(relu(dq(x_q, A)), B), B)), B)
    """
    return rewrite(gm, (Rule("clip", find=_CLIPPED_POOL, build=_clipped),))


@graph_pass(needs=(HAS_VALUES,), gives=())
def crop_negative_pads(gm: GraphModule) -> PassResult:
    """Slice where a pad is negative: ExecuTorch's kernel stops at such.

    Before:  pad(dq(x_q), [-1, 2])
    After:   pad(dq(q(slice(dq(x_q), -1, 1))), [0, 2])
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, PAD)]:
        pads: Any = argument(node, "pad")
        is_constant = node.target is not PAD[0] or argument(node, "mode") == "constant"
        if is_constant and any(isinstance(p, int) and p < 0 for p in pads):
            cropped = _cropped(editor, node, pads)
            rest = [max(p, 0) if isinstance(p, int) else p for p in pads]
            value = argument(node, "value") or 0
            kept = any(isinstance(p, Node) or p for p in rest)
            made = (
                editor.call(aten.constant_pad_nd.default, cropped, rest, value, like=node)
                if kept
                else cropped
            )
            editor.replace(node, made)
    return PassResult(editor.finish())


def _cropped(editor: Editor, pad: Node, pads: Sequence[Any]) -> Node:
    """The input of a pad, cropped by its negative sides and quantized as before."""
    read = x = pad.args[0]
    assert isinstance(read, Node)
    assert isinstance(x, Node)
    rank = x.meta["val"].dim()
    for at, (left, right) in enumerate(zip(pads[::2], pads[1::2], strict=True)):
        start = -left if isinstance(left, int) and left < 0 else 0
        end = right if isinstance(right, int) and right < 0 else sys.maxsize
        if start or end < 0:
            x = editor.call(aten.slice.Tensor, x, rank - 1 - at, start, end, like=pad)
    if read.target is not DequantizePerTensor:
        return x
    stored = editor.call(QuantizePerTensor, x, *read.args[1:], like=pad)
    return editor.call(DequantizePerTensor, stored, *read.args[1:], like=pad)


_MOST_JOINED = 5
"""Tensors that the delegate joins in one operator."""
_Rows = tuple[int, int]


@graph_pass(needs=(HAS_VALUES,), gives=())
def edges_as_slices(gm: GraphModule) -> PassResult:
    """Write pads that reflect, repeat or continue their input as slices of it, joined.

    ExecuTorch writes them as an index, which it computes element by element outside the delegate;
    of a circular one torch writes into a tensor of fixed sizes.

    Before:  q(pad(dq(x_q), [1, 1], "reflect"))
    After:   q(cat([dq(q(slice(dq(x_q), -1, 1, 2))), dq(x_q), dq(q(slice(dq(x_q), -1, -2, -1)))]))
    """
    editor = Editor(gm)
    notes = []
    for pad in [n for n in gm.graph.nodes if _is_of_slices(n)]:
        editor.replace(pad, _padded(editor, pad))
        notes.append(Note(pad.name, "pad -> cat of slices"))
    return PassResult(editor.finish(), tuple(notes))


def _is_of_slices(pad: Node) -> bool:
    if pad.target is not aten.pad.default:
        return False
    if argument(pad, "mode") == "circular":
        return bool(min(argument(pad, "pad")) >= 0)
    return pads_by_slices(pad) and not is_left_plain(pad)


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
            x = _stored(editor, x, pad) if any(pads[2 * at + 2 :]) else x
    return x


def _rows(mode: str, size: int, before: int, behind: int) -> tuple[list[_Rows], list[_Rows]]:
    """The first row of the input and the one behind the last, of each slice in front and behind."""
    if mode == "circular":
        return [(-before, sys.maxsize)] if before else [], [(0, behind)] if behind else []
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
        parts.append(_stored(editor, part, pad))
    while len(parts) > 1:
        parts = [
            _stored(editor, _cat(editor, pad, parts[at : at + _MOST_JOINED], dim), pad)
            for at in range(0, len(parts), _MOST_JOINED)
        ]
    return parts


def _stored(editor: Editor, made: Node, pad: Node) -> Node:
    """A part of a pad, in integers where the pad is."""
    return between(editor, made, pad) if pads_by_slices(pad) else made


def _cat(editor: Editor, pad: Node, parts: Sequence[Node], dim: int) -> Node:
    return editor.call(aten.cat.default, list(parts), dim, like=pad) if len(parts) > 1 else parts[0]


_MOST_DIMS = 6
"""Of a tensor in the delegate."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def shuffles_as_permutations(gm: GraphModule) -> PassResult:
    """Write shuffles of integers as a permutation, which the delegate has.

    ExecuTorch's own kernel of integers takes several times as long; that of floats does not.

    Before:  q(pixel_shuffle(dq(x_q[1, 4 * C, H, W]), 2))
    After:   q(reshape(dq(q(permute(dq(q(reshape(dq(x_q), [1, C, 2, 2, H, W]))), …))), …))
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, SHUFFLES)]:
        x: Any = node.args[0]
        if x.target is not DequantizePerTensor or not sole_quantize(node) or fallback_of(node):
            continue
        parts, order = _apart(node, x.meta["val"].shape)
        sizes, made = view_shape(parts), view_shape(node.meta["val"].shape)
        if sizes is None or made is None or len(sizes) > _MOST_DIMS:
            reason = f"the delegate permutes one dynamic size and {_MOST_DIMS} sizes at most"
            notes.append(Note(node.name, reason, skipped=True))
            continue
        x = between(editor, editor.call(aten.reshape.default, x, sizes, like=node), node)
        x = between(editor, editor.call(aten.permute.default, x, order, like=node), node)
        editor.replace(node, editor.call(aten.reshape.default, x, made, like=node))
        notes.append(Note(node.name, f"{node.target} -> permute"))
    return PassResult(editor.finish(), tuple(notes))


def _apart(node: Node, shape: Sequence[Any]) -> tuple[list[Any], list[int]]:
    """The sizes that a shuffle permutes, and their order behind it."""
    number: Any = node.args[1]
    if node.target is aten.channel_shuffle.default:
        parts = [shape[0], number, shape[1] // number, *shape[2:]]
        return parts, [0, 2, 1, *range(3, len(parts))]
    *lead, channels, height, width = shape
    if node.target is aten.pixel_shuffle.default:
        image, turn = [channels // number**2, number, number, height, width], (0, 3, 1, 4, 2)
    else:
        image = [channels, height // number, number, width // number, number]
        turn = (0, 2, 4, 1, 3)
    return [*lead, *image], [*range(len(lead)), *(len(lead) + at for at in turn)]


@graph_pass(needs=(HAS_VALUES,), gives=())
def move_integers(gm: GraphModule) -> PassResult:
    """Take data movement that the delegate lacks out of their q/dq.

    Before:  q(expand(dq(x_q)))
    After:   expand(x_q)
    """
    editor = Editor(gm)
    notes = []
    for quantize in [n for n in gm.graph.nodes if n.target is QuantizePerTensor]:
        source = quantize.args[0]
        assert isinstance(source, Node)
        moved = editor.now(source)
        call = moved.args[0] if is_getitem(moved) else moved
        assert isinstance(call, Node)
        if not is_call(call, MOVED_AS_INTEGERS) or delegate_moves(call) or fallback_of(call):
            continue
        if any(u is not quantize for u in moved.users):
            continue
        integers = _on_integers(editor, call, quantize)
        if integers is None:
            continue
        if moved is not call:
            integers = editor.call(
                moved.target, integers, moved.args[1], like=moved, before=quantize
            )
        editor.replace(quantize, integers)
        editor.discard([moved, call])
        notes.append(Note(call.name, f"{call.target} moves the integers, outside the delegate"))
    return PassResult(editor.finish(), tuple(notes))


def _on_integers(editor: Editor, call: Node, quantize: Node) -> Node | None:
    """The operator on the integers behind its inputs' dq; None if these have other qparams."""
    floats = [n for n in call.all_input_nodes if isinstance(n.meta.get("val"), Tensor)]
    floats = [n for n in floats if n.meta["val"].is_floating_point()]
    stored = {n: n.args[0] for n in floats if n.target is DequantizePerTensor}
    if len(stored) != len(floats) or any(n.args[1:] != quantize.args[1:] for n in floats):
        return None
    if is_call(call, IDENTITIES):
        return next(iter(stored.values()))  # type: ignore[return-value]  # a dq reads a node
    args: Any = map_arg(call.args, lambda n: stored.get(n, n))
    kwargs: Any = map_arg(call.kwargs, lambda n: stored.get(n, n))
    # A copy that made a view possible is gone.
    target = aten.reshape.default if call.target is aten.view.default else call.target
    return editor.call(target, *args, like=call, before=quantize, **kwargs)


def delegate_moves(call: Node) -> bool:
    """True if the delegate has this data movement in integers, in the form that stands here."""
    if is_call(call, SLICE):
        return slices_neighbours(call)
    if call.target is aten.view.default:
        shape: Any = call.args[1]
        return all(isinstance(s, int) for s in shape)
    return False

"""Operators that only move data, on the integers that come in; and the q/dq that are left."""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.kernels.conditions import BETWEEN_INTEGERS
from pt2e_quant.kernels.quantized_values import affine_of, requantized
from pt2e_quant.backends.cpu.table import TABLE
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.ops import arguments
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.passes.duplicate_dequantize import one_reader

__all__ = ["FULL_RANGES", "move_integers", "single_pass_qdq"]

aten: Any = torch.ops.aten

FULL_RANGES = {torch.uint8: (0, 255, torch.quint8), torch.int8: (-128, 127, torch.qint8)}


@graph_pass(needs=(one_reader,))
def move_integers(gm: GraphModule) -> PassResult:
    """Let operators that move data move the integers.

    Before:  q(max_pool2d(dq(x)))
    After:   quantized.max_pool2d(x)
    """
    rows = [row for row in TABLE if BETWEEN_INTEGERS in row.constraints]
    patterns = [(row, op) for row in rows for op in row.find]
    matches = find_matches(gm.graph, patterns, _fits)
    editor = Editor(gm)
    for _, match in matches:
        _replace(editor, match)
    notes = tuple(Note(match.anchor.name, "on integers") for _, match in matches)
    return PassResult(changed=editor.finish(), notes=notes)


def _sources(match: Match) -> list[Node]:
    value = match["x"]
    return list(value) if isinstance(value, tuple) else [value]


def _fits(row: OpRow, match: Match) -> bool:
    """Whether everything that goes in and out has the same qparams."""
    if match.anchor.target is aten.max_pool2d_with_indices.default:
        return False
    written = requantized(match.anchor)
    return written is not None and {affine_of(s) for s in _sources(match)} == {written[0]}


def _replace(editor: Editor, match: Match) -> None:
    anchor = match.anchor
    written = requantized(anchor)
    assert written is not None
    integers: dict[Node, Any] = {s: s.args[0] for s in _sources(match)}
    value = fake_cast(anchor.meta["val"], written[0].dtype)
    if anchor.target is aten.max_pool2d.default:
        made = _max_pool(editor, anchor, integers[match["x"]], value)
    else:
        args: Any = torch.fx.node.map_arg(anchor.args, lambda n: integers.get(n, n))
        kwargs: Any = torch.fx.node.map_arg(anchor.kwargs, lambda n: integers.get(n, n))
        made = editor.call(anchor.target, *args, like=anchor, before=anchor, val=value, **kwargs)
    for reader in written[1]:
        editor.replace(reader, made)
    editor.discard([anchor, *integers])


def _max_pool(editor: Editor, pool: Node, source: Node, value: Any) -> Node:
    """Torch's integer max-pool; in channels-last order it is vectorized over channels."""
    found = arguments(pool)
    ordered = editor.call(
        aten.contiguous.default,
        source,
        like=pool,
        before=pool,
        val=source.meta["val"],
        memory_format=torch.channels_last,
    )
    sizes = [_pair(found[name]) for name in ("kernel_size", "stride", "padding", "dilation")]
    sizes[1] = sizes[1] or sizes[0]
    target: Any = torch.ops.quantized.max_pool2d.default
    return editor.call(
        target, ordered, *sizes, found["ceil_mode"], like=pool, before=pool, val=value
    )


def _pair(given: Any) -> list[int]:
    sizes = [given] if isinstance(given, int) else list(given)
    return sizes * 2 if len(sizes) == 1 else sizes


@graph_pass()
def single_pass_qdq(gm: GraphModule) -> PassResult:
    """Spell the q/dq that are left with torch's own quantized tensors, one pass over the data.

    Before:  quantize_per_tensor(x, …)
    After:   int_repr(quantize_per_tensor(x, …, quint8))

    The written-out form takes five passes. Both round half to even; they differ where x / scale
    lies within float rounding of a half, in three values of a million.
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        affine = affine_of(node)
        source: Any = node.args[0] if affine is not None else None
        if affine is None or affine.dtype not in FULL_RANGES or not _is_plain(node):
            continue
        low, high, quantized = FULL_RANGES[affine.dtype]
        place: dict[str, Any] = {"like": node, "before": node, "val": node.meta["val"]}
        if node.target is QuantizePerTensor:
            held = editor.call(
                aten.quantize_per_tensor.default,
                source,
                affine.scale,
                affine.zero_point,
                quantized,
                **place,
            )
            made = editor.call(aten.int_repr.default, held, **place)
            if (affine.quant_min, affine.quant_max) != (low, high):
                limits = affine.quant_min, affine.quant_max
                made = editor.call(aten.clamp.default, made, *limits, **place)
        else:
            held = editor.call(
                aten._make_per_tensor_quantized_tensor.default,
                source,
                affine.scale,
                affine.zero_point,
                **place,
            )
            made = editor.call(aten.dequantize.self, held, **place)
        editor.replace(node, made)
        notes.append(Note(node.name, "one pass"))
    return PassResult(changed=editor.finish(), notes=tuple(notes))


def _is_plain(node: Node) -> bool:
    """Whether the float side is float32, which torch's quantized tensors need."""
    source: Any = node.args[0] if node.target is QuantizePerTensor else node
    is_known = node.target in (QuantizePerTensor, DequantizePerTensor)
    return is_known and source.meta["val"].dtype is torch.float32

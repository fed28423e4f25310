"""Operators that split and join tensors, as runtimes take them: slices, selects, one dtype."""

import operator
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import SPLIT, Overloads, argument, aten, is_call, is_getitem
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_JOINS: Overloads = (
    *(aten.cat.default, aten.concat.default, aten.concatenate.default, aten.stack.default),
    *(aten.hstack.default, aten.vstack.default, aten.dstack.default, aten.column_stack.default),
)
"""Operators of a list of tensors, which runtimes take in one dtype alone."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_as_slices(gm: GraphModule) -> PassResult:
    """Write each part of a split as a slice: one operator, one tensor, one quantize.

    Before:  a, b = split(x, 2, 1)
    After:   a = slice(x, 1, 0, 2);  b = slice(x, 1, 2, 4)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        if is_getitem(node) and isinstance(node.args[0], Node) and is_call(node.args[0], SPLIT):
            editor.discard([node, node.args[0]])
            part = _slice_of(editor, node, node.args[0]) if node.users else None
            if part is not None:
                editor.replace(node, part)
                notes.append(Note(node.name, "split -> slice"))
    return PassResult(editor.finish(), tuple(notes))


def _slice_of(editor: Editor, node: Node, split: Node) -> Node | None:
    x, at = split.args[0], node.args[1]
    values = split.meta["val"]
    if split.target is aten.unbind.int or not isinstance(x, Node) or not isinstance(at, int):
        return None
    if not values[0].is_floating_point():
        return None
    dim = int(argument(split, "dim"))
    parts = [v.shape[dim] for v in values]
    if not all(isinstance(p, int) for p in parts):
        return None
    at %= len(parts)
    start = sum(parts[:at])
    return editor.call(aten.slice.Tensor, x, dim, start, start + parts[at], like=node, before=node)


@graph_pass(needs=(HAS_VALUES,), gives=())
def chunk_by_sizes(gm: GraphModule) -> PassResult:
    """Write a chunk with the sizes of its parts, which exporters would compute at run time.

    Before:  a, b = chunk(x, 2, 1)
    After:   a, b = split_with_sizes(x, [3, 2], 1); of a dynamic size s
             a = slice(x, 1, 0, (s + 1) // 2);  b = slice(x, 1, (s + 1) // 2, (s + 1) // 2 * 2)
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if n.target is aten.chunk.default]:
        x, count, dim = (argument(node, name) for name in ("self", "chunks", "dim"))
        sizes = [v.shape[dim] for v in node.meta["val"]]
        if all(isinstance(size, int) for size in sizes):
            split = editor.call(aten.split_with_sizes.default, x, sizes, dim, like=node)
            editor.replace(node, split)
            continue
        whole = editor.call(aten.sym_size.int, x, dim, like=node)
        more = editor.call(operator.add, whole, count - 1, like=node)
        step = editor.call(operator.floordiv, more, count, like=node)
        for part in [u for u in node.users if is_getitem(u)]:
            at: Any = part.args[1]
            start = editor.call(operator.mul, step, at, like=node)
            end = editor.call(operator.mul, step, at + 1, like=node)
            made = editor.call(aten.slice.Tensor, x, dim, start, end, like=part, before=part)
            editor.replace(part, made)
    return PassResult(editor.finish())


@graph_pass(needs=(HAS_VALUES,), gives=())
def unbind_as_selects(gm: GraphModule) -> PassResult:
    """Write each part of an unbind as a select, which becomes a slice and a view.

    Before:  q, k, v = unbind(x, 0)
    After:   q = select(x, 0, 0);  k = select(x, 0, 1);  v = select(x, 0, 2)
    """
    editor = Editor(gm)
    notes = []
    for node in list(gm.graph.nodes):
        unbind = node.args[0] if is_getitem(node) else None
        if not isinstance(unbind, Node) or unbind.target is not aten.unbind.int:
            continue
        editor.discard([unbind, node])
        if node.users:
            x, dim = argument(unbind, "self"), argument(unbind, "dim")
            part = editor.call(aten.select.int, x, dim, node.args[1], like=node, before=node)
            editor.replace(node, part)
            notes.append(Note(node.name, "unbind -> select"))
    return PassResult(editor.finish(), tuple(notes))


@graph_pass(needs=(HAS_VALUES,), gives=())
def promote_cats(gm: GraphModule) -> PassResult:
    """Cast the inputs of a cat that have not its result's dtype.

    Before:  cat([x, y])             x: float64, y: float32
    After:   cat([x, to(y, float64)])
    """
    editor = Editor(gm)
    for node in [n for n in gm.graph.nodes if is_call(n, _JOINS)]:
        wanted = node.meta["val"].dtype
        parts: Any = node.args[0]
        for part in dict.fromkeys(parts):
            if part.meta["val"].dtype != wanted:
                cast = editor.call(aten.to.dtype, part, wanted, like=part, before=node)
                node.replace_input_with(part, cast)
                editor.changed = True
    return PassResult(editor.finish())

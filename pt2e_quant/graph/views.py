"""Views of storage: which operators make them, and how a write through one reaches its source."""

from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Node
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import fake_value
from pt2e_quant.graph.ops import (
    IDENTITIES,
    RESHAPE,
    SPLIT,
    SQUEEZE,
    Overloads,
    arguments,
    aten,
    is_call,
    is_getitem,
)

_TO: Overloads = (
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten.to.other,
    aten.contiguous.default,
)
MAYBE_VIEWS: Overloads = (
    aten.reshape.default,
    aten.flatten.using_ints,
    aten.ravel.default,
    *_TO,
)
"""Operators that return a view where layout and dtype allow it, else a copy."""

_SELF_INVERSE: Overloads = (
    aten.transpose.int,
    aten.swapaxes.default,
    aten.t.default,
    aten.mT.default,
    aten.numpy_T.default,
)
_SCATTERS: dict[Any, Any] = {
    aten.select.int: aten.select_scatter.default,
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.diagonal.default: aten.diagonal_scatter.default,
}
_BIJECTIONS: Overloads = (
    *RESHAPE,
    *SQUEEZE,
    *_SELF_INVERSE,
    aten.permute.default,
    aten.movedim.int,
    aten.movedim.intlist,
    aten.unsqueeze.default,
    aten.ravel.default,
)


def is_copy(node: Node, editor: Editor) -> bool:
    """True if an operator that may return a view makes a copy, for the layout at hand."""
    if not is_call(node, MAYBE_VIEWS):
        return False
    source: Any = node.args[0]
    result = fake_value(editor.mode, node.target, node.args, node.kwargs)
    before, after = source.meta["val"].untyped_storage(), result.untyped_storage()
    return bool(before._cdata != after._cdata)


def sizes_of(value: Node, editor: Editor, *, like: Node, before: Node) -> list[Any]:
    """A value's sizes as arguments of a call; unknown ones are read at run time."""
    shape = list(value.meta["val"].shape)
    symbolic = [i for i, s in enumerate(shape) if not isinstance(s, int)]
    for i in symbolic:
        shape[i] = editor.call(aten.sym_size.int, value, i, like=like, before=before, val=shape[i])
    return shape


def may_be_zero(size: int | SymInt) -> bool:
    """True if a size is 0 for some size of the inputs, which are 1 or more.

    torch traces dynamic sizes from 2; its programs take 1 as well.
    """
    if isinstance(size, int):
        return size == 0
    env = size.node.shape_env
    ranges = {
        symbol: ValueRanges(1, limits.upper) if 1 < limits.lower <= 2 else limits
        for symbol, limits in env.var_to_range.items()
    }
    return bool(bound_sympy(size.node.expr, ranges).lower <= 0)


def can_write_through(view: Node) -> bool:
    """True if `write_through` knows a view."""
    if is_getitem(view):
        pieces: Any = view.args[0]
        if is_call(pieces, (aten.unbind.int,)):
            return True
        return is_call(pieces, SPLIT) and _piece_bounds(view) is not None
    if is_call(view, (aten.narrow.default,)):
        return all(isinstance(v, int) for v in view.args[1:4])
    return view.target in _SCATTERS or is_call(view, IDENTITIES + _TO + _BIJECTIONS)


def _piece_bounds(view: Node) -> tuple[int, int, int] | None:
    """Dimension, start and end of an element of a split, None if only known at run time."""
    pieces: Any = view.args[0]
    index: Any = view.args[1]
    values = pieces.meta["val"]
    dim = int(arguments(pieces)["dim"]) % values[0].dim()
    lengths = [v.shape[dim] for v in values[: index + 1]]
    if not isinstance(index, int) or not all(isinstance(n, int) for n in lengths):
        return None
    return dim, sum(lengths[:-1]), sum(lengths)


def write_through(view: Node, whole: Node, new: Node, editor: Editor, *, before: Node) -> Node:
    """The source of a view after the view was given a new value.

    Args:
        view: the node that took the view.
        whole: the value of its source before the write.
        new: the new value of the view.
        editor: inserts the calls.
        before: where to insert them.
    """

    def call(target: Any, *args: Any) -> Node:
        val = whole.meta["val"]
        return editor.call(target, *args, like=view, before=before, val=val)

    if is_getitem(view):
        pieces: Any = view.args[0]
        if is_call(pieces, (aten.unbind.int,)):
            dim = arguments(pieces)["dim"]
            return call(aten.select_scatter.default, whole, new, dim, view.args[1])
        bounds = _piece_bounds(view)
        assert bounds is not None  # can_write_through
        return call(aten.slice_scatter.default, whole, new, *bounds)
    given = list(arguments(view).values())[1:]
    if view.target in _SCATTERS:
        return call(_SCATTERS[view.target], whole, new, *given)
    if is_call(view, (aten.narrow.default,)):
        dim, start, length = given
        return call(aten.slice_scatter.default, whole, new, dim, start, start + length)
    if is_call(view, IDENTITIES + _TO):  # of `to`, only those that returned a view come here
        return new
    if is_call(view, _SELF_INVERSE):
        return call(view.target, new, *given)
    if is_call(view, (aten.permute.default,)):
        dims = [d % len(given[0]) for d in given[0]]
        return call(aten.permute.default, new, [dims.index(i) for i in range(len(dims))])
    if is_call(view, (aten.movedim.int, aten.movedim.intlist)):
        return call(view.target, new, given[1], given[0])
    if is_call(view, (aten.unsqueeze.default,)):
        return call(aten.squeeze.dim, new, given[0])
    sizes = sizes_of(whole, editor, like=view, before=before)
    return call(aten.reshape.default, new, sizes)


def retaken(view: Node, source: Node, editor: Editor, *, before: Node) -> Node:
    """A view taken again, of another value of its source."""
    if is_getitem(view):
        pieces: Any = view.args[0]
        again = editor.call(
            pieces.target,
            source,
            *pieces.args[1:],
            like=pieces,
            before=before,
            val=pieces.meta["val"],
            **pieces.kwargs,
        )
        return editor.call(
            view.target, again, view.args[1], like=view, before=before, val=view.meta["val"]
        )
    target: Any = view.target
    kwargs: dict[str, Any] = dict(view.kwargs)
    if is_call(view, (aten.view.default,)):
        target = aten.reshape.default  # the other value may have another layout
    return editor.call(
        target,
        source,
        *view.args[1:],
        like=view,
        before=before,
        val=view.meta["val"],
        **kwargs,
    )


def same_view(view: Node, source: Node) -> tuple[object, ...] | None:
    """A key that is equal for equal views of one source, None if it takes computed arguments."""
    rest = [v for v in (*view.args[1:], *view.kwargs.values()) if not isinstance(v, Node)]
    if len(rest) != len(view.args) - 1 + len(view.kwargs):
        return None
    return (source, view.target, repr(view.args[1:]), repr(view.kwargs))


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a tensor value."""
    value = node.meta.get("val")
    return value.dtype if isinstance(value, Tensor) else None

"""Softmaxes and means that a model writes out, as the operators that they are."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import (
    DIV,
    IDENTITIES,
    MEAN,
    MUL,
    RESHAPE,
    SUB,
    argument,
    aten,
    calls,
    is_call,
    is_getitem,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_SUM = (aten.sum.dim_IntList,)
_EXP = (aten.exp.default,)
_IMAGE = 4


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_reductions(gm: GraphModule) -> PassResult:
    """Call softmax and means of images where a model writes them out.

    Before:  e = exp(x - amax(x, d, keepdim)); e / sum(e, d, keepdim);  mean(flatten(x, 2), 2)
    After:   softmax(x, d);                                             mean(x, [2, 3])
             sum(x, [2, 3]) / (H * W) and mean(mean(x, 3), 2) are mean(x, [2, 3]) too
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, (*DIV, *MUL, *MEAN))]:
        made = (
            _softmax(editor, node)
            or _mean_of_sum(editor, node)
            or _mean_of_flat(editor, node)
            or _mean_of_mean(editor, node)
        )
        if made is not None:
            editor.replace(node, made)
            notes.append(Note(node.name, f"is written out: {made.target}"))
    return PassResult(editor.finish(), tuple(notes))


def _softmax(editor: Editor, node: Node) -> Node | None:
    """A quotient of exponentials by their sum."""
    above, total = node.args[:2] if is_call(node, DIV) else (None, None)
    if not isinstance(above, Node) or not calls(total, _SUM):
        return None
    dims: Any = argument(total, "dim")
    summed = total.args[0]
    if not dims or len(dims) != 1 or not argument(total, "keepdim"):
        return None
    dim = dims[0] % node.meta["val"].dim()
    found = _exponent(above, dim)
    if found is None or not isinstance(summed, Node) or _exponent(summed, dim) != found:
        return None
    value = node.meta["val"]
    if value.dtype != found.meta["val"].dtype:
        return None
    return editor.call(aten.softmax.int, found, dim, like=node, val=value)


def _exponent(node: Node, dim: int) -> Node | None:
    """What an exponential is of, less the greatest value along an axis, which cancels out."""
    x = node.args[0] if is_call(node, _EXP) else None
    if not isinstance(x, Node) or not is_call(x, SUB) or argument(x, "alpha") != 1:
        return x if isinstance(x, Node) else None
    source, limit = x.args[:2]
    while isinstance(limit, Node) and (is_call(limit, IDENTITIES) or is_getitem(limit)):
        limit = limit.args[0]
    if not isinstance(source, Node) or not isinstance(limit, Node) or limit.args[0] is not source:
        return x
    if not is_call(limit, (aten.amax.default, aten.max.dim)) or not argument(limit, "keepdim"):
        return x
    dims: Any = argument(limit, "dim")
    own = [dims] if isinstance(dims, int) else list(dims)
    return source if [d % source.meta["val"].dim() for d in own] == [dim] else x


def _mean_of_sum(editor: Editor, node: Node) -> Node | None:
    """A sum over axes by the number of their elements."""
    if not is_call(node, DIV + MUL) or not all(isinstance(a, Node) for a in node.args[:1]):
        return None
    total: Any = node.args[0]
    number: Any = node.args[1]
    if not is_call(total, _SUM) or argument(total, "dtype") is not None:
        return None
    x, dims = total.args[0], argument(total, "dim")
    value: Tensor = x.meta["val"]
    if not dims or not value.is_floating_point() or node.meta["val"].dtype != value.dtype:
        return None
    count: Any = 1
    for dim in dims:
        count = count * value.shape[dim]
    held = number.meta.get("val") if isinstance(number, Node) else number
    if is_call(node, DIV):
        same = not isinstance(held, Tensor) and str(held) in (str(count), f"{count}.0")
    else:
        same = isinstance(held, float) and isinstance(count, int) and held == 1.0 / count
    if not same:
        return None
    keepdim = argument(total, "keepdim")
    return editor.call(aten.mean.dim, x, list(dims), keepdim, like=node, val=node.meta["val"])


def _mean_of_mean(editor: Editor, node: Node) -> Node | None:
    """A mean over axes of a mean over others, which nothing else reads."""
    inner: Any = node.args[0]
    if not is_call(node, MEAN) or not is_call(inner, MEAN) or len(inner.users) > 1:
        return None
    keepdim, first, second = (
        argument(node, "keepdim"),
        argument(inner, "dim"),
        argument(node, "dim"),
    )
    if keepdim != argument(inner, "keepdim") or not first or not second:
        return None
    if any(argument(mean, "dtype") is not None for mean in (inner, node)):
        return None
    x, rank = inner.args[0], inner.args[0].meta["val"].dim()
    gone = {dim % rank for dim in first}
    left = [axis for axis in range(rank) if keepdim or axis not in gone]
    dims = sorted(gone | {left[dim] for dim in second})
    return editor.call(aten.mean.dim, x, dims, keepdim, like=node, val=node.meta["val"])


def _mean_of_flat(editor: Editor, node: Node) -> Node | None:
    """A mean over the last axis of an image whose rows were joined to one."""
    flat: Any = node.args[0]
    if not is_call(node, MEAN) or not is_call(flat, RESHAPE) or argument(node, "dtype"):
        return None
    x, dims = flat.args[0], argument(node, "dim")
    shape, joined = x.meta["val"].shape, flat.meta["val"].shape
    if len(shape) != _IMAGE or len(joined) != _IMAGE - 1 or list(dims or ()) not in ([2], [-1]):
        return None
    if str(list(joined)) != str([*shape[:2], shape[2] * shape[3]]):
        return None
    made = editor.call(aten.mean.dim, x, [2, 3], like=node)
    if not argument(node, "keepdim"):
        return made
    return editor.call(aten.unsqueeze.default, made, -1, like=node, val=node.meta["val"])

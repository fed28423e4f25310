"""Norms that a model writes out, as the operators that they are."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import ADD, DIV, MEAN, MUL, SUB, argument, aten, calls, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_IMAGE = 4
"""The rank of images; instance norms of larger ranks stay as they are written."""


@dataclass(frozen=True, slots=True)
class _Norm:
    """A quotient by a deviation.

    Args:
        x: what is normalized.
        dims: the axes that means are taken along.
        eps: what is added to the variance.
        is_centered: whether the mean is taken away.
    """

    x: Node
    dims: tuple[int, ...]
    eps: float
    is_centered: bool


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_norms(gm: GraphModule) -> PassResult:
    """Call layer, RMS and instance norms where a model writes them; factors stay behind them.

    Image networks (ConvNeXt, NAFNet) write norms of channels so, which torch has no operator for.
    RMS norms of the last axis are idioms that backends know as they are written.

    Before:  u = mean(x, 1, keepdim); v = mean((x - u) ** 2, 1, keepdim); (x - u) / sqrt(v + eps)
    After:   permute(layer_norm(permute(x, [0, 2, 3, 1]), [C], None, None, eps), [0, 3, 1, 2])
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, DIV + MUL)]:
        norm = _normalized(node)
        made = _called(editor, norm, node) if norm is not None else None
        if made is not None:
            editor.replace(node, made)
            notes.append(Note(node.name, f"is written out: {made.target}"))
    return PassResult(editor.finish(), tuple(notes))


def _called(editor: Editor, norm: _Norm, node: Node) -> Node | None:
    """The operator's call; None if there is none."""
    value: Tensor = norm.x.meta["val"]
    if value.dtype != node.meta["val"].dtype:
        return None
    rank, eps = value.dim(), norm.eps
    if len(norm.dims) > 1:
        if norm.dims != tuple(range(2, rank)) or rank > _IMAGE or not norm.is_centered:
            return None
        options = (None, None, None, None, True, 0.0, eps, False)
        target = aten.instance_norm.default
        return editor.call(target, norm.x, *options, like=node, val=node.meta["val"])
    (dim,) = norm.dims
    size, is_last = value.shape[dim], dim == rank - 1
    if not isinstance(size, int) or (is_last and not norm.is_centered):
        return None
    order = [at for at in range(rank) if at != dim] + [dim]
    y = norm.x if is_last else editor.call(aten.permute.default, norm.x, order, like=node)
    if norm.is_centered:
        y = editor.call(aten.layer_norm.default, y, [size], None, None, eps, like=node)
    else:
        y = editor.call(aten.rms_norm.default, y, [size], None, eps, like=node)
    if is_last:
        return y
    return editor.call(aten.permute.default, y, [order.index(at) for at in range(rank)], like=node)


def _normalized(node: Node) -> _Norm | None:
    """What a quotient by a deviation normalizes."""
    left, right = node.args[:2]
    pairs: list[Any] = [(left, right)] if is_call(node, DIV) else [(left, right), (right, left)]
    root = aten.sqrt.default if is_call(node, DIV) else aten.rsqrt.default
    for above, deviation in pairs:
        if not isinstance(above, Node) or not calls(deviation, (root,)):
            continue
        total = deviation.args[0]
        if not calls(total, ADD) or argument(total, "alpha") != 1:
            continue
        variance, eps = total.args[:2]
        if not isinstance(eps, (int, float)):
            continue
        found = _centered(above)
        if found is not None and _is_variance(variance, *found):
            return _Norm(*found, float(eps), is_centered=True)
        if calls(variance, MEAN) and _squares(variance.args[0], above):
            dims = _dims_of(variance, above)
            return None if dims is None else _Norm(above, dims, float(eps), is_centered=False)
    return None


def _centered(node: Node) -> tuple[Node, tuple[int, ...]] | None:
    """What a difference takes the mean of from itself, and along which axes."""
    x, mean = node.args[:2] if is_call(node, SUB) and argument(node, "alpha") == 1 else (None, None)
    if not isinstance(x, Node) or not isinstance(mean, Node) or not is_call(mean, MEAN):
        return None
    dims = _dims_of(mean, x)
    return None if dims is None or mean.args[0] is not x else (x, dims)


def _dims_of(mean: Node, x: Node) -> tuple[int, ...] | None:
    """The axes that a mean keeps with a size of 1."""
    dims: Any = argument(mean, "dim")
    if not argument(mean, "keepdim") or not isinstance(dims, (list, tuple)) or not dims:
        return None
    rank: int = x.meta["val"].dim()
    return tuple(sorted(int(dim) % rank for dim in dims))


def _is_variance(node: Any, x: Node, dims: tuple[int, ...]) -> bool:
    """True for the mean of squared differences from the mean, without a correction."""
    if calls(node, (aten.var.correction, aten.var.dim)):
        plain = (
            argument(node, "correction") == 0
            if node.target is aten.var.correction
            else not argument(node, "unbiased")
        )
        return plain and node.args[0] is x and _dims_of(node, x) == dims
    if not calls(node, MEAN) or _dims_of(node, x) != dims:
        return False
    factors = _factors(node.args[0])
    return bool(factors) and all(
        isinstance(factor, Node) and _centered(factor) == (x, dims) for factor in factors
    )


def _squares(node: Any, x: Node) -> bool:
    factors = _factors(node)
    return bool(factors) and all(factor is x for factor in factors)


def _factors(square: Any) -> tuple[Any, ...]:
    """What a square multiplies by itself, once or twice; nothing of what is no product."""
    is_power = calls(square, (aten.pow.Tensor_Scalar,)) and square.args[1] == 2
    if is_power or calls(square, (aten.square.default,)):
        return tuple(square.args[:1])
    return tuple(square.args[:2]) if calls(square, MUL) else ()

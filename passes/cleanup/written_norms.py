"""Layer norms that a model writes out, as the operator that they are."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import ADD, DIV, MEAN, MUL, SUB, Overloads, argument, aten, is_call
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass


@graph_pass(needs=(HAS_VALUES,), gives=())
def name_norms(gm: GraphModule) -> PassResult:
    """Call a layer norm over one axis where a model writes it out; its factors stay behind it.

    Image networks (ConvNeXt, NAFNet) write norms of channels so, which torch has no operator for.

    Before:  u = mean(x, 1, keepdim); v = mean((x - u) ** 2, 1, keepdim); (x - u) / sqrt(v + eps)
    After:   permute(layer_norm(permute(x, [0, 2, 3, 1]), [C], None, None, eps), [0, 3, 1, 2])
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if is_call(n, DIV + MUL)]:
        found = _normalized(node)
        if found is None:
            continue
        x, dim, eps = found
        value: Tensor = x.meta["val"]
        rank, size = value.dim(), value.shape[dim]
        if not isinstance(size, int) or value.dtype != node.meta["val"].dtype:
            continue
        order = [at for at in range(rank) if at != dim] + [dim]
        is_last = dim == rank - 1
        y = x if is_last else editor.call(aten.permute.default, x, order, like=node)
        y = editor.call(aten.layer_norm.default, y, [size], None, None, eps, like=node)
        if not is_last:
            back = [order.index(at) for at in range(rank)]
            y = editor.call(aten.permute.default, y, back, like=node)
        editor.replace(node, y)
        notes.append(Note(node.name, "a layer norm is written out"))
    return PassResult(editor.finish(), tuple(notes))


def _normalized(node: Node) -> tuple[Node, int, float] | None:
    """What a quotient by a deviation normalizes, along which axis, and its least variance."""
    left, right = node.args[:2]
    pairs: list[Any] = [(left, right)] if is_call(node, DIV) else [(left, right), (right, left)]
    root = aten.sqrt.default if is_call(node, DIV) else aten.rsqrt.default
    for centered, deviation in pairs:
        if not isinstance(centered, Node) or not _calls(deviation, (root,)):
            continue
        found, total = _centered(centered), deviation.args[0]
        if found is None or not _calls(total, ADD) or argument(total, "alpha") != 1:
            continue
        variance, eps = total.args[:2]
        if isinstance(eps, (int, float)) and _is_variance(variance, *found):
            return (*found, float(eps))
    return None


def _centered(node: Node) -> tuple[Node, int] | None:
    """What a difference takes the mean of from itself, and along which axis."""
    x, mean = node.args[:2] if is_call(node, SUB) and argument(node, "alpha") == 1 else (None, None)
    if not isinstance(x, Node) or not isinstance(mean, Node) or not is_call(mean, MEAN):
        return None
    dim = _dim_of(mean, x)
    return None if dim is None or mean.args[0] is not x else (x, dim)


def _dim_of(mean: Node, x: Node) -> int | None:
    """The one axis that a mean keeps with a size of 1."""
    dims: Any = argument(mean, "dim")
    if not argument(mean, "keepdim") or not isinstance(dims, (list, tuple)) or len(dims) != 1:
        return None
    rank: int = x.meta["val"].dim()
    return int(dims[0]) % rank


def _is_variance(node: Any, x: Node, dim: int) -> bool:
    """True for the mean of squared differences from the mean, without a correction."""
    if _calls(node, (aten.var.correction, aten.var.dim)):
        plain = (
            argument(node, "correction") == 0
            if node.target is aten.var.correction
            else not argument(node, "unbiased")
        )
        return plain and node.args[0] is x and _dim_of(node, x) == dim
    if not _calls(node, MEAN) or _dim_of(node, x) != dim:
        return False
    square: Any = node.args[0]
    is_power = _calls(square, (aten.pow.Tensor_Scalar,)) and square.args[1] == 2
    if is_power or _calls(square, (aten.square.default,)):
        factors = square.args[:1]
    else:
        factors = square.args[:2] if _calls(square, MUL) else ()
    return bool(factors) and all(
        isinstance(factor, Node) and _centered(factor) == (x, dim) for factor in factors
    )


def _calls(value: object, overloads: Overloads) -> bool:
    """True for a node that calls one of these; an operand may be a number."""
    return isinstance(value, Node) and is_call(value, overloads)

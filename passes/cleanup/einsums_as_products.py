"""Write einsums of two tensors as matrix products."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.ops import argument, aten
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Skip
from pt2e_quant.passes.cleanup.contractions import einsum_terms, permuted


@graph_pass(needs=(HAS_VALUES,), gives=())
def einsums_as_products(gm: GraphModule) -> PassResult:
    """Write each einsum of two tensors as a matmul between permutations.

    Before:  einsum("bqhd,bkhd->bhqk", x, y)
    After:   matmul(permute(x, [0, 2, 1, 3]), permute(y, [0, 2, 3, 1]))

    Axes that one tensor alone sums, that are expanded from 1, or that would be put together and
    have a dynamic size leave it as it is, with the reason.
    """
    editor = Editor(gm)
    notes = []
    for node in [n for n in gm.graph.nodes if n.target is aten.einsum.default]:
        read = _read(node)
        if isinstance(read, Skip):
            notes.append(Note(node.name, read.reason, skipped=True))
            continue
        editor.replace(node, _written(read, editor, node))
        notes.append(Note(node.name, "written as a matmul"))
    return PassResult(editor.finish(), tuple(notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Einsum:
    """The tensors of an einsum and its axes, a letter each.

    Args:
        tensors: both.
        terms: the axes of each, and of the result.
        shared: those that both have and the result too.
        summed: those that both have and the result has not.
        own: those of one tensor alone, of each.
        sizes: of each axis.
    """

    tensors: Sequence[Node]
    terms: Sequence[str]
    shared: list[str]
    summed: list[str]
    own: tuple[list[str], list[str]]
    sizes: dict[str, int]


def _read(node: Node) -> _Einsum | Skip:
    tensors: Sequence[Node] = argument(node, "tensors")
    terms = einsum_terms(node)
    if isinstance(terms, Skip):
        return terms
    left, right, result = terms
    shapes = [
        dict(zip(term, tensor.meta["val"].shape, strict=True))
        for term, tensor in zip(terms, tensors, strict=False)
    ]
    both = [axis for axis in left if axis in right]
    if any(str(shapes[0][axis]) != str(shapes[1][axis]) for axis in both):
        return Skip("an axis of size 1 is expanded")
    summed = [axis for axis in both if axis not in result]
    own = [a for a in left if a not in both], [a for a in right if a not in both]
    if not summed or not set(own[0] + own[1]) <= set(result):
        return Skip("no axis is summed over both tensors, or one over a single tensor")
    sizes = shapes[0] | shapes[1]
    put_together = [axis for axes in own if len(axes) > 1 for axis in axes]
    if not all(isinstance(sizes[axis], int) for axis in put_together):
        return Skip("axes of a dynamic size would be put together")
    shared = [axis for axis in both if axis in result]
    return _Einsum(tensors=tensors, terms=terms, shared=shared, summed=summed, own=own, sizes=sizes)


def _written(read: _Einsum, editor: Editor, like: Node) -> Node:
    own_left, own_right = read.own
    parts = (own_left, read.summed), (read.summed, own_right)
    x, y = (_matrices(read, at, part, editor, like) for at, part in enumerate(parts))
    made = editor.call(aten.matmul.default, x, y, like=like)
    # The rows first: behind them the columns are still one axis.
    made = _apart(made, len(read.shared), own_left, read, editor, like)
    made = _apart(made, len(read.shared) + len(own_left), own_right, read, editor, like)
    order = [*read.shared, *own_left, *own_right]
    return permuted(made, [order.index(axis) for axis in read.terms[2]], editor, like)


def _matrices(
    read: _Einsum, at: int, parts: tuple[list[str], list[str]], editor: Editor, like: Node
) -> Node:
    """One of the tensors as matrices: its shared axes, then an axis for each of two parts."""
    order = [*read.shared, *parts[0], *parts[1]]
    made = permuted(read.tensors[at], [read.terms[at].index(axis) for axis in order], editor, like)
    for place, part in enumerate(parts, start=len(read.shared)):
        if not part:
            made = editor.call(aten.unsqueeze.default, made, place, like=like)
        elif len(part) > 1:
            end = place + len(part) - 1
            made = editor.call(aten.flatten.using_ints, made, place, end, like=like)
    return made


def _apart(
    made: Node, place: int, axes: list[str], read: _Einsum, editor: Editor, like: Node
) -> Node:
    """A result with the axes that one of its axes stands for in its place."""
    if not axes:
        return editor.call(aten.squeeze.dim, made, place, like=like)
    if len(axes) == 1:
        return made
    return editor.call(aten.unflatten.int, made, place, [read.sizes[a] for a in axes], like=like)

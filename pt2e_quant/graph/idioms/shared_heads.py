"""Keys and values that several heads of queries share: repeated for each, or not copied."""

from dataclasses import dataclass

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.composite import define_composite
from pt2e_quant.graph.ops import EXPAND, MATMUL, RESHAPE, UNSQUEEZE, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.rewrite import Rule, Skip


@dataclass(frozen=True, slots=True)
class SharedHeads:
    """A matrix for each shared head, and how many heads read each.

    Args:
        source: [N, H, T, D].
        repeats: how many heads read each matrix.
        is_turned: whether they read it transposed.
        between: the nodes between the source and the product, the last first.
    """

    source: Node
    repeats: int
    is_turned: bool
    between: tuple[Node, ...]


def read_shared_heads(node: Node) -> SharedHeads | None:
    """The matrices behind `repeat_kv`: unsqueeze, expand, reshape, and maybe a transpose."""
    between = [node]
    is_turned = False
    if node.target is aten.transpose.int and {a % 4 for a in _axes(node)} == {2, 3}:
        is_turned = True
        node = _input(node)
        between.append(node)
    if not is_call(node, RESHAPE) or node.meta["val"].dim() != 4:
        return None
    wide = _input(node)
    if not is_call(wide, EXPAND) or wide.meta["val"].dim() != 5:
        return None
    apart = _input(wide)
    if not is_call(apart, UNSQUEEZE) or apart.meta["val"].dim() != 5:
        return None
    source = _input(apart)
    value, expanded = source.meta["val"], wide.meta["val"].shape
    if not isinstance(value, Tensor) or value.dim() != 4 or apart.meta["val"].shape[2] != 1:
        return None
    repeats, heads = expanded[2], value.shape[1]
    if not isinstance(repeats, int) or not isinstance(heads, int):
        return None
    same = [str(expanded[i]) for i in (0, 1, 3, 4)] == [str(s) for s in value.shape]
    joined = node.meta["val"].shape[1] == repeats * heads
    if repeats < 2 or not same or not joined:
        return None
    return SharedHeads(source, repeats, is_turned, (*between, wide, apart))


def _axes(node: Node) -> tuple[int, int]:
    return node.args[1], node.args[2]  # type: ignore[return-value]  # integers by schema


def _input(node: Node) -> Node:
    found = node.args[0]
    assert isinstance(found, Node)
    return found


def _regroup(x: Tensor, heads: int) -> Tensor:
    """[N, H, T, D] as [N, heads, H * T / heads, D], in the same order in memory."""
    batch, given, rows, width = x.shape
    repeats = max(given, heads) // min(given, heads)
    length = rows * repeats if heads < given else rows // repeats
    return x.reshape(batch, heads, length, width).clone()


RegroupHeads = define_composite("regroup_heads(Tensor x, int heads) -> Tensor", _regroup)


def _build(m: Match, editor: Editor) -> Node | Skip:
    """One product for the rows of all heads that share a matrix.

    Repeating keys and values copies the whole cache at each token.
    """
    node, left, right = m.anchor, m["left"], m["right"]
    shared = read_shared_heads(right) if isinstance(right, Node) else None
    if shared is None:
        return Skip("it repeats no heads")
    heads = shared.source.meta["val"].shape[1]
    if left.meta["val"].dim() != 4 or left.meta["val"].shape[1] != heads * shared.repeats:
        return Skip("its rows are not of as many heads")
    rows = editor.call(RegroupHeads, left, heads, like=node)
    matrix = editor.now(shared.source)
    if shared.is_turned:
        matrix = editor.call(aten.transpose.int, matrix, -2, -1, like=node)
    product = editor.call(aten.matmul.default, rows, matrix, like=node)
    whole = editor.call(RegroupHeads, product, heads * shared.repeats, like=node)
    editor.discard(shared.between)
    return whole


def _repeats(value: object) -> bool:
    return isinstance(value, Node) and read_shared_heads(value) is not None


SHARED_HEADS_RULES = (
    Rule("shared heads", Op(MATMUL, Var("left"), Var("right", where=_repeats)), _build),
)
"""Before: matmul(q, repeat(k)).  After: the product of stacked rows with k, regrouped back."""

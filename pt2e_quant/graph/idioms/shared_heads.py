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

    @property
    def heads(self) -> int:
        """The number of matrices for each of N."""
        return int(self.source.meta["val"].shape[1])

    def has_reader(self, left: Node) -> bool:
        """True if the left side of a product has a matrix for each head that reads one."""
        shape = left.meta["val"].shape
        return len(shape) == 4 and shape[1] == self.heads * self.repeats


def read_shared_heads(node: Node) -> SharedHeads | None:
    """The matrices behind `repeat_kv`: unsqueeze, expand, reshape, and maybe a transpose."""
    is_turned = node.target is aten.transpose.int and {a % 4 for a in _axes(node)} == {2, 3}
    joined = _input(node) if is_turned else node
    if not is_call(joined, RESHAPE) or not repeats_heads(joined):
        return None
    wide = _input(joined)
    apart = _input(wide)
    repeats = wide.meta["val"].shape[2]
    if not is_call(wide, EXPAND) or not is_call(apart, UNSQUEEZE) or repeats < 2:
        return None
    between = (joined, wide, apart)
    return SharedHeads(_input(apart), repeats, is_turned, (node, *between)[not is_turned :])


def repeats_heads(node: Node) -> bool:
    """True if unsqueeze, expand and this reshape repeat each matrix of [N, H, T, D] for R heads.

    Sizes are compared as expressions: asking a symbolic one would add a guard.
    """
    wide = node.args[0]
    apart = wide.args[0] if isinstance(wide, Node) and wide.args else None
    source = apart.args[0] if isinstance(apart, Node) and apart.args else None
    if not isinstance(wide, Node) or not isinstance(apart, Node) or not isinstance(source, Node):
        return False
    values = [n.meta["val"] for n in (node, wide, apart, source)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    joined, expanded, single, value = (value.shape for value in values)
    if (len(value), len(single), len(expanded), len(joined)) != (4, 5, 5, 4) or single[2] != 1:
        return False
    if not all(isinstance(size, int) for size in (expanded[2], value[1], joined[1])):
        return False
    same = [str(expanded[i]) for i in (0, 1, 3, 4)] == [str(size) for size in value]
    kept = [str(joined[i]) for i in (0, 2, 3)] == [str(value[i]) for i in (0, 2, 3)]
    return same and kept and joined[1] == expanded[2] * value[1]


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
    if not shared.has_reader(left):
        return Skip("its rows are not of as many heads")
    rows = editor.call(RegroupHeads, left, shared.heads, like=node)
    matrix = editor.now(shared.source)
    if shared.is_turned:
        matrix = editor.call(aten.transpose.int, matrix, -2, -1, like=node)
    product = editor.call(aten.matmul.default, rows, matrix, like=node)
    whole = editor.call(RegroupHeads, product, shared.heads * shared.repeats, like=node)
    editor.discard(shared.between)
    return whole


def _repeats(value: object) -> bool:
    return isinstance(value, Node) and read_shared_heads(value) is not None


SHARED_HEADS_RULES = (
    Rule("shared heads", Op(MATMUL, Var("left"), Var("right", where=_repeats)), _build),
)
"""Before: matmul(q, repeat(k)).  After: the product of stacked rows with k, regrouped back."""

"""What stands in front of a product in a graph and costs nothing: transposes, shared heads."""

from torch.fx import Node

from pt2e_quant.graph.ops import aten

__all__ = ["repeats_heads", "swaps_last_axes"]

_SWAPS = (aten.transpose.int, aten.swapaxes.default)


def swaps_last_axes(node: Node) -> bool:
    """Whether a permutation swaps the last two axes and moves no other."""
    rank = node.meta["val"].dim()
    if node.target is aten.mT.default:
        return True
    if node.target in _SWAPS:
        axes = {int(axis) % rank for axis in node.args[1:3]}  # type: ignore[arg-type]  # integers by schema
        return rank >= 2 and axes == {rank - 2, rank - 1}
    if node.target is aten.permute.default:
        order = [int(axis) % rank for axis in node.args[1]]  # type: ignore[union-attr,arg-type]  # by schema
        return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]
    return False


def repeats_heads(node: Node) -> bool:
    """Whether unsqueeze, expand and this reshape repeat each matrix of [N, G, S, D] for R heads.

    Sizes are compared as expressions: asking a symbolic one would add a guard.
    """
    wide = node.args[0]
    apart = wide.args[0] if isinstance(wide, Node) else None
    source = apart.args[0] if isinstance(apart, Node) else None
    if not isinstance(wide, Node) or not isinstance(apart, Node) or not isinstance(source, Node):
        return False
    joined, expanded, single, value = (n.meta["val"].shape for n in (node, wide, apart, source))
    if (len(value), len(single), len(expanded), len(joined)) != (4, 5, 5, 4) or single[2] != 1:
        return False
    if not all(isinstance(size, int) for size in (expanded[2], value[1], joined[1])):
        return False
    same = [str(expanded[i]) for i in (0, 1, 3, 4)] == [str(size) for size in value]
    kept = [str(joined[i]) for i in (0, 2, 3)] == [str(value[i]) for i in (0, 2, 3)]
    return same and kept and joined[1] == expanded[2] * value[1]

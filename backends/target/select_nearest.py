"""Nearest resizing as selections of rows and pixels."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.backends.target.requantize_between import between
from pt2e_quant.graph.ops import argument, arguments, aten
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.rewrite import Editor, Skip

_ONE_AXIS = {
    "upsample_nearest": aten.upsample_nearest1d.default,
    "_upsample_nearest_exact": aten._upsample_nearest_exact1d.default,
}

_EXACT = 2**24
"""The largest size whose places float32 tells apart."""


def selected_nearest(m: Match, editor: Editor) -> Node | Skip:
    """Write a nearest resize as selections along each axis, with channels last; a rule builds it.

    The indices are those of torch's own operator, so every size and factor gives the same values.

    Before:  upsample_nearest2d(x, None, [2.0, 2.0])          x: [N, C, 2, 3]
    After:   y = index_select(permute(x, [0, 2, 3, 1]), 2, [0, 0, 1, 1, 2, 2])
             permute(index_select(y, 1, [0, 0, 1, 1]), [0, 3, 1, 2])

    Args:
        m: a match with "x" for what is resized.
        editor: of the graph.

    Returns:
        What is read in the resize's place, or why it is left.
    """
    x, node = m.node("x"), m.anchor
    before, after = x.meta["val"].shape[2:], node.meta["val"].shape[2:]
    if not all(isinstance(size, int) for size in (*before, *after)):
        return Skip("its height or width is known only at run time")
    if max(before) > _EXACT:
        return Skip("float32 does not hold each of its places")
    rank = len(before)
    y = editor.call(aten.permute.default, x, [0, *range(2, rank + 2), 1], like=node)
    for axis, scale in reversed(list(enumerate(_scales(node)))):
        places = _places(node, before[axis], after[axis], scale)
        if torch.equal(places, torch.arange(before[axis])):
            continue
        index = editor.constant(f"{node.name}_places", places, like=node)
        y = between(editor, y, node)
        y = editor.call(aten.index_select.default, y, axis + 1, index, like=node)
    order = [0, rank + 1, *range(1, rank + 1)]
    y = between(editor, y, node)
    return editor.call(aten.permute.default, y, order, like=node, val=node.meta["val"])


def _places(node: Node, before: int, after: int, scale: float | None) -> Tensor:
    """The place that each element of an axis comes from."""
    call = _ONE_AXIS[str(node.target).split(".")[1][: -len("1d")]]
    # Not float64: torch computes places in the precision of what it resizes.
    found: Tensor = call(torch.arange(before, dtype=torch.float32)[None, None], [after], scale)
    return found.flatten().long()


def _scales(node: Node) -> Sequence[float | None]:
    """The scale that an overload is given for each axis."""
    rank = node.meta["val"].dim() - 2
    if str(node.target).endswith(".vec"):
        return argument(node, "scale_factors") or [None] * rank
    names = ("scales",) if rank == 1 else ("scales_d", "scales_h", "scales_w")[-rank:]
    given = arguments(node)
    return [given[name] for name in names]

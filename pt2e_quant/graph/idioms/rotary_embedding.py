"""Rotary embeddings: halves of a vector rotated against each other by angles of its position.

Su et al. 2021, "RoFormer", in the form of GPT-NeoX and Llama.
"""

from itertools import product

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.composite import define_composite
from pt2e_quant.graph.ops import (
    ADD,
    CASTS,
    CAT,
    IDENTITIES,
    MUL,
    SLICE,
    UNSQUEEZE,
    arguments,
    aten,
    is_call,
)
from pt2e_quant.graph.pattern import Many, Match, Op, Var, either_order
from pt2e_quant.graph.rewrite import Rule, Skip

_ELEMENTWISE = (aten.cos.default, aten.sin.default, *CASTS, *IDENTITIES)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x[B, H, T, D] by angles whose cosines and sines are [T, D / 2]."""
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


RotaryEmbedding = define_composite(
    "rotary_embedding(Tensor x, Tensor cos, Tensor sin) -> Tensor", _rotate
)


def _patterns() -> tuple[Op, ...]:
    """Patterns of x * cos + cat(-x[..., D / 2:], x[..., :D / 2]) * sin, in any order."""
    straight = either_order(MUL, Var("x"), Var("cos"))
    turned = either_order(MUL, Op(CAT, Many("parts"), name="turned"), Var("sin"))
    return tuple(
        op for left, right in product(straight, turned) for op in either_order(ADD, left, right)
    )


def rotary_rule() -> Rule:
    """`RotaryEmbedding` in the place of a rotation of x[B, H, T, D] in float32.

    Only where cosines and sines are seen to be the same in both halves, and for all heads and
    sequences. Tables that several rotations share are halved once.
    """
    halves: dict[Node, Node] = {}

    def build(m: Match, editor: Editor) -> Node | Skip:
        x, tables = m["x"], (m["cos"], m["sin"])
        reason = _why_not(m)
        if reason is not None:
            return Skip(reason)
        width = x.meta["val"].shape[-1]
        for table in tables:
            if table not in halves:
                shape = [-1, width]
                rows = editor.call(aten.reshape.default, table, shape, like=table, after=table)
                ends = 1, 0, width // 2
                halves[table] = editor.call(aten.slice.Tensor, rows, *ends, like=table, after=rows)
        return editor.call(RotaryEmbedding, x, *(halves[t] for t in tables), like=m.anchor)

    return Rule("a rotary embedding", _patterns(), build)


def _why_not(m: Match) -> str | None:
    x, parts = m["x"], m["parts"]
    value = x.meta["val"]
    if value.dim() != 4 or value.dtype is not torch.float32:
        return "it rotates no float32[B, H, T, D]"
    if not _are_halves(m.nodes["turned"], x, parts):
        return "what is added are not the halves of the same vector, turned"
    for table in (m["cos"], m["sin"]):
        if not isinstance(table, Node) or not _is_table(table, value):
            return "its angles are not one row for each position, the same for both halves"
    return None


def _are_halves(turned: Node, x: Node, parts: tuple[Node, ...]) -> bool:
    """True if parts are -x[..., D / 2:] and x[..., :D / 2], in this order."""
    width = x.meta["val"].shape[-1]
    if not isinstance(width, int) or width % 2 or len(parts) != 2:
        return False
    minus, low = parts
    if arguments(turned)["dim"] not in (-1, 3) or minus.target is not aten.neg.default:
        return False
    ranges = (_range(minus.args[0], x, width), _range(low, x, width))
    return ranges == ((width // 2, width), (0, width // 2))


def _range(node: object, x: Node, width: int) -> tuple[int, int] | None:
    """The start and end of a slice of the last axis of x; None for anything else."""
    if not isinstance(node, Node) or not is_call(node, SLICE) or node.args[0] is not x:
        return None
    given = arguments(node)
    limits = [given[name] for name in ("start", "end")]
    if given["dim"] not in (-1, 3) or given["step"] != 1:
        return None
    if not all(limit is None or isinstance(limit, int) for limit in limits):
        return None
    start, end, _ = slice(*limits).indices(width)
    return start, end


def _is_table(node: Node, x: Tensor) -> bool:
    """True if a factor is [1, 1, T, D] for an x[B, H, T, D], and both its halves are the same."""
    shape = node.meta["val"].shape
    if len(shape) != 4 or [str(s) for s in shape] != ["1", "1", *map(str, x.shape[2:])]:
        return False
    current: Node | None = node
    while current is not None:
        if is_call(current, CAT):
            given, rank = arguments(current), current.meta["val"].dim()
            first, *rest = given["tensors"]
            return given["dim"] in (-1, rank - 1) and rest == [first]
        current = _source(current)
    return False


def _source(node: Node) -> Node | None:
    """The input of a view or elementwise operator that keeps the last axis, else None."""
    source = node.args[0] if node.args else None
    if not isinstance(source, Node):
        return None
    if is_call(node, UNSQUEEZE):
        rank = node.meta["val"].dim()
        return source if arguments(node)["dim"] % rank < rank - 1 else None
    if is_call(node, _ELEMENTWISE):
        return source
    is_scaled = is_call(node, MUL) and isinstance(node.args[1], (int, float))
    return source if is_scaled else None

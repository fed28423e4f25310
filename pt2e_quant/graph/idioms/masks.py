"""Masks made of booleans at run time, as `decompose_attention` writes them out."""

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.idioms.composite import define_composite
from pt2e_quant.graph.ops import CASTS, MUL, SUB, arguments, aten
from pt2e_quant.graph.pattern import Lit, Match, Op, Var
from pt2e_quant.graph.rewrite import Rule, Skip


def _additive(seen: Tensor, low: float, dtype: torch.dtype) -> Tensor:
    """0.0 where `seen` is true, `low` elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, low)


def _any(seen: Tensor, dim: int, keepdim: bool, dtype: torch.dtype) -> Tensor:
    """1.0 for the rows in which `seen` is true anywhere, 0.0 for the others."""
    return seen.any(dim, keepdim).to(dtype)


AdditiveMask = define_composite(
    "additive_mask(Tensor seen, float low, ScalarType dtype) -> Tensor", _additive
)
AnySeen = define_composite(
    "any_seen(Tensor seen, int dim, bool keepdim, ScalarType dtype) -> Tensor", _any
)


def _is_bool(value: object) -> bool:
    fake = value.meta.get("val") if isinstance(value, Node) else None
    return isinstance(fake, Tensor) and fake.dtype is torch.bool


_SEEN = Var("seen", where=_is_bool)
_BIG = Var("big", where=lambda value: isinstance(value, (int, float)))


def _build_additive(m: Match, editor: Editor) -> Node | Skip:
    value = m.anchor.meta["val"]
    if not value.is_floating_point():
        return Skip("the mask is added to integers")
    return editor.call(AdditiveMask, m["seen"], -float(m["big"]), value.dtype, like=m.anchor)


def _build_any(m: Match, editor: Editor) -> Node | Skip:
    value, given = m.anchor.meta["val"], arguments(m.nodes["any"])
    if not value.is_floating_point():
        return Skip("its result is no float")
    seen, dim, keepdim = given["self"], given["dim"], given["keepdim"]
    return editor.call(AnySeen, seen, dim, keepdim, value.dtype, like=m.anchor)


MASK_RULES = (
    Rule(
        "an additive mask",
        Op(MUL, Op(SUB, Op(CASTS, _SEEN), Lit(1.0), name="shifted"), _BIG),
        _build_additive,
    ),
    Rule(
        "rows that see anything",
        Op(CASTS, Op(aten.any.dim, _SEEN, name="any", users=None)),
        _build_any,
    ),
)
"""(seen - 1) * big as `AdditiveMask`, and a cast of any(seen) as `AnySeen`."""

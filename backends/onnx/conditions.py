"""Conditions of the op table's rows: what must hold of a match, with the text that says so."""

from typing import Any

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import MAX_POOL2D, argument, arguments, is_getitem
from pt2e_quant.graph.pattern import Match

__all__ = [
    "BOTH_ARE_COMPUTED",
    "IS_A_CALL",
    "IS_GLOBAL_MEAN",
    "LIMITS_ARE_LITERALS",
    "NO_ALPHA",
    "NO_CEIL",
    "NO_DIVISOR",
    "PADS_WITH_A_NUMBER",
    "POOLS_TO_ONE",
    "RETURNS_NO_INDICES",
    "SUM_IS_OF_TENSORS",
    "WEIGHT_IS_A_MATRIX",
]


def _rank(node: object) -> int | None:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else None


def _limits_are_literals(match: Match) -> bool:
    """Whether the anchor's bounds are numbers (relu and relu6 have none to ask about)."""
    found = arguments(match.anchor)
    names = ("min", "max", "min_val", "max_val")
    return not any(isinstance(found.get(name), Node) for name in names)


def _no_alpha(match: Match) -> bool:
    """Whether sums are not scaled, in whichever operator of the match has them."""
    scales = [
        found[name]
        for node in match.covered
        for found in (arguments(node),)
        for name in ("alpha", "beta")
        if name in found and not is_getitem(node)
    ]
    return all(scale == 1 for scale in scales)


def _are_tensors(match: Match) -> bool:
    return all(_rank(match.values.get(at)) is not None for at in ("x", "y"))


def _no_divisor(match: Match) -> bool:
    return argument(match.anchor, "divisor_override") is None


def _no_ceil(match: Match) -> bool:
    return not argument(match.anchor, "ceil_mode")


def _pools_to_one(match: Match) -> bool:
    size = argument(match.anchor, "output_size")
    return all(s == 1 for s in (size if isinstance(size, (list, tuple)) else [size]))


def _is_global_mean(match: Match) -> bool:
    found = arguments(match.anchor)
    rank, dims = _rank(match["x"]), found["dim"]
    if rank is None or rank < 3 or not dims or found["dtype"] is not None:
        return False
    return sorted(d % rank for d in dims) == list(range(2, rank))


def _returns_no_indices(match: Match) -> bool:
    call = match.anchor
    if call.target is not MAX_POOL2D[-1]:
        return True
    return all(is_getitem(user) and user.args[1] == 0 for user in call.users)


def _pads_with_a_number(match: Match) -> bool:
    found: dict[str, Any] = arguments(match.anchor)
    if found.get("mode", "constant") not in ("constant", "reflect", "replicate"):
        return False
    value = found.get("value")
    return value is None or isinstance(value, (int, float))


def weight_is_a_matrix(node: Node) -> bool:
    """Whether the right operand has two dimensions, as a linear layer's weight."""
    right = node.args[1] if len(node.args) > 1 else None
    return _rank(right) == 2


def is_a_call(node: Node) -> bool:
    """Always true: its being there sets this pattern apart from that of a constant weight."""
    return node.op == "call_function"


def _both_are_computed(match: Match) -> bool:
    return not match.is_constant("x") and not match.is_constant("y")


BOTH_ARE_COMPUTED = Constraint(text="two computed tensors", holds=_both_are_computed)
IS_A_CALL = is_a_call
LIMITS_ARE_LITERALS = Constraint(text="bounds that are numbers", holds=_limits_are_literals)
NO_ALPHA = Constraint(text="alpha and beta == 1", holds=_no_alpha)
NO_CEIL = Constraint(text="no ceil_mode", holds=_no_ceil)
"""QLinearAveragePool divides the last windows of `ceil_mode` by too much."""
NO_DIVISOR = Constraint(text="no divisor_override", holds=_no_divisor)
PADS_WITH_A_NUMBER = Constraint(text="constant, reflect or replicate", holds=_pads_with_a_number)
POOLS_TO_ONE = Constraint(text="output size 1", holds=_pools_to_one)
IS_GLOBAL_MEAN = Constraint(text="the mean over all spatial axes", holds=_is_global_mean)
RETURNS_NO_INDICES = Constraint(text="indices that nobody reads", holds=_returns_no_indices)
SUM_IS_OF_TENSORS = Constraint(text="two tensors", holds=_are_tensors)
WEIGHT_IS_A_MATRIX = weight_is_a_matrix

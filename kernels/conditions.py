"""Conditions of the op table's rows: what must hold of a match, with the text that says so."""

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import MAX_POOL2D, argument, arguments, is_getitem
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.quantized_values import requantized, rewritten

__all__ = [
    "ADDS_EQUAL_SHAPES",
    "ADDS_UNSCALED",
    "BATCHED_1D",
    "BATCHED_2D",
    "LIMITS_ARE_NUMBERS",
    "NO_INDICES",
    "QUANTIZED_RESULT",
    "REWRITTEN_RESULT",
    "rank_of",
]


def rank_of(node: object) -> int | None:
    """How many dimensions a node's value has, None if it is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else None


def _limits_are_numbers(match: Match) -> bool:
    """Whether the anchor's bounds are given and are numbers (relu has none to ask about)."""
    found = arguments(match.anchor)
    names = [n for n in ("min", "max", "min_val", "max_val") if n in found]
    return all(isinstance(found[name], (int, float)) for name in names)


def _adds_unscaled(match: Match) -> bool:
    return bool(argument(match.nodes["add"], "alpha") == 1)


def _adds_equal_shapes(match: Match) -> bool:
    """Whether both summands are computed tensors of one shape: nothing is broadcast."""
    left = match.nodes["op"].meta.get("val")
    right = match["y"].meta.get("val") if isinstance(match["y"], Node) else None
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or match.is_constant("y"):
        return False
    # As expressions: asking a symbolic size whether it equals another would add a guard.
    return [str(size) for size in left.shape] == [str(size) for size in right.shape]


def _no_indices(match: Match) -> bool:
    call = match.anchor
    if call.target is not MAX_POOL2D[-1]:
        return True
    return all(is_getitem(user) and user.args[1] == 0 for user in call.users)


BATCHED_1D = Constraint(text="N, C, L inputs", holds=lambda match: rank_of(match["x"]) == 3)
BATCHED_2D = Constraint(text="N, C, H, W inputs", holds=lambda match: rank_of(match["x"]) == 4)
LIMITS_ARE_NUMBERS = Constraint(text="bounds that are numbers", holds=_limits_are_numbers)
ADDS_UNSCALED = Constraint(text="alpha == 1", holds=_adds_unscaled)
ADDS_EQUAL_SHAPES = Constraint(text="two computed tensors of one shape", holds=_adds_equal_shapes)
NO_INDICES = Constraint(text="indices that nobody reads", holds=_no_indices)
QUANTIZED_RESULT = Constraint(
    text="a result that all its readers quantize alike",
    holds=lambda match: requantized(match.anchor) is not None,
)
REWRITTEN_RESULT = Constraint(
    text="a result that all its readers quantize alike",
    holds=lambda match: rewritten(match.anchor) is not None,
)

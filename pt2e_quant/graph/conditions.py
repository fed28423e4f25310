"""Conditions of op-table entries that several backends state: what must hold of a match."""

from types import NoneType

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import MAX_POOL2D, argument, arguments, is_getitem
from pt2e_quant.graph.pattern import Match, call_behind

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def rank_of(node: object) -> int | None:
    """Return the number of dimensions of a node's value, None if it is no tensor."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    return value.dim() if isinstance(value, Tensor) else None


def _takes_floats(match: Match) -> bool:
    """True if the result and all operands are float tensors, as far as the graph says."""
    operands = (match.values.get(name) for name in ("x", "y", "w", "b", "mask"))
    held = (match.anchor, *(value for value in operands if value is not None))
    values = (n.meta.get("val") if isinstance(n, Node) else None for n in held)
    return all(isinstance(v, Tensor) and v.dtype in _FLOATS for v in values)


def _limits_are_literals(match: Match) -> bool:
    """True if the anchor's bounds are not computed; relu and relu6 have none to ask about."""
    found = arguments(match.anchor)
    names = (name for name in ("min", "max", "min_val", "max_val") if name in found)
    return all(isinstance(found[name], (int, float, NoneType)) for name in names)


def _adds_unscaled(match: Match) -> bool:
    """True if sums are not scaled, in whichever operator of the match has them."""
    scales = (arguments(node).get(name, 1) for node in match.covered for name in ("alpha", "beta"))
    return all(scale == 1 for scale in scales)


def _adds_equal_shapes(match: Match) -> bool:
    """True if both summands are computed tensors of one shape: nothing is broadcast."""
    left = match.nodes["op"].meta.get("val")
    right = match["y"].meta.get("val") if isinstance(match["y"], Node) else None
    if not isinstance(left, Tensor) or not isinstance(right, Tensor) or match.is_constant("y"):
        return False
    # As expressions: asking a symbolic size whether it equals another would add a guard.
    return [str(size) for size in left.shape] == [str(size) for size in right.shape]


def _no_indices(match: Match) -> bool:
    call = call_behind(match.anchor)
    if call.target is not MAX_POOL2D[-1]:
        return True
    return all(is_getitem(user) and (user.args[1] == 0 or not user.users) for user in call.users)


def _has_constant_bias(match: Match) -> bool:
    return not isinstance(match.values.get("b"), Node) or match.is_constant("b")


def _pools_to_one(match: Match) -> bool:
    size = argument(match.anchor, "output_size")
    return all(s == 1 for s in (size if isinstance(size, (list, tuple)) else [size]))


def _is_global_mean(match: Match) -> bool:
    found = arguments(match.anchor)
    rank, dims = rank_of(match["x"]), found["dim"]
    if rank is None or rank < 3 or not dims or found["dtype"] is not None:
        return False
    return sorted(d % rank for d in dims) == list(range(2, rank))


FLOAT_OPERANDS = Constraint(text="float32, float16 or bfloat16 tensors", holds=_takes_floats)
BATCHED_1D = Constraint(text="N, C, L inputs", holds=lambda match: rank_of(match["x"]) == 3)
BATCHED_2D = Constraint(text="N, C, H, W inputs", holds=lambda match: rank_of(match["x"]) == 4)
BATCHED_3D = Constraint(text="N, C, D, H, W inputs", holds=lambda match: rank_of(match["x"]) == 5)
LIMITS_ARE_LITERALS = Constraint(
    text="bounds that are numbers, or none",
    holds=_limits_are_literals,
)
ADDS_UNSCALED = Constraint(text="alpha == 1", holds=_adds_unscaled)
ADDS_EQUAL_SHAPES = Constraint(text="two computed tensors of one shape", holds=_adds_equal_shapes)
TENSOR_OPERANDS = Constraint(
    text="two tensors",
    holds=lambda match: all(rank_of(match.values.get(at)) is not None for at in ("x", "y")),
)
CONSTANT_BIAS = Constraint(text="a constant bias", holds=_has_constant_bias)
NO_INDICES = Constraint(text="indices that nobody reads", holds=_no_indices)
POOLS_TO_ONE = Constraint(text="an output of one element per channel", holds=_pools_to_one)
GLOBAL_MEAN = Constraint(text="the mean over all spatial axes", holds=_is_global_mean)

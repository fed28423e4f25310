"""Calls that cut values off at two numbers."""

import math

from torch.fx import Node

from pt2e_quant.graph.ops import CLAMP, HARDTANH, RELU, RELU6, arguments, is_call

_NAMES = ((HARDTANH, "min_val", "max_val"), (CLAMP, "min", "max"))


def clamp_bounds(node: Node) -> tuple[float, float] | None:
    """The least and the greatest result of a clamp, infinite where it has no such bound.

    None for other calls, and for a clamp whose bounds are computed.
    """
    if is_call(node, RELU):
        return 0.0, math.inf
    if is_call(node, RELU6):
        return 0.0, 6.0
    for overloads, *names in _NAMES:
        if is_call(node, overloads):
            low, high = (arguments(node)[name] for name in names)
            low, high = (-math.inf if low is None else low), (math.inf if high is None else high)
            are_numbers = all(isinstance(bound, (int, float)) for bound in (low, high))
            return (float(low), float(high)) if are_numbers else None
    return None

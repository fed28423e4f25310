"""The number of 8-bit products that an int32 sum holds; longer sums wrap around or saturate."""

import math
from collections.abc import Iterable
from dataclasses import replace

from torch.fx import Node

from pt2e_quant.core.granularity import PerChannel
from pt2e_quant.core.integer import longest_inner_axis
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.pattern import Match

LONGEST_SUM = longest_inner_axis(255, 128)
"""65793 products of a uint8 and an int8, each of the largest."""


def limit_sums(rows: Iterable[OpRow]) -> tuple[OpRow, ...]:
    """Rows; those that multiply quantized activations by a weight take no longer sums."""
    return tuple(_limited(row) for row in rows)


def _limited(row: OpRow) -> OpRow:
    roles = {slot.role: slot for slot in row.slots if slot.accepts}
    if Role.INPUT not in roles or Role.WEIGHT not in roles:
        return row
    weight = roles[Role.WEIGHT]
    axis = _output_axis(weight)

    def fits(match: Match) -> bool:
        node = match.values.get(weight.at)
        shape = list(node.meta["val"].shape) if isinstance(node, Node) else []
        if not all(isinstance(size, int) for size in shape):
            return True
        return bool(math.prod(shape[:axis] + shape[axis + 1 :]) <= LONGEST_SUM)

    limit = Constraint(text=f"at most {LONGEST_SUM} products in a sum", holds=fits)
    return replace(row, constraints=(*row.constraints, limit))


def _output_axis(weight: Slot) -> int:
    axes = (s.granularity.axis for s in weight.accepts if isinstance(s.granularity, PerChannel))
    return next(axes, 0)

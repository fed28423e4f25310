"""What the CPU backend keeps float although oneDNN could run it in integers.

A max-pool or a cat on uint8 moves a quarter of the bytes; but away from convolutions and linears it
costs a quantize before it and a dequantize behind it. Products that measured slower stay float as
well: see `place_by_speed`, and `kernels.onednn.speed` for classes of sizes.
"""

from collections.abc import Collection

from torch.fx import Node

from pt2e_quant.backends.target.policy import Policy, Regions
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OpKind, OpRow, OpTable, Preference
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.onednn.speed import SLOWER

__all__ = ["policy_of", "runs_in_integers"]


def runs_in_integers(row: OpRow, match: Match, allowed: Collection[str] = ()) -> bool:
    """Whether an entry would take a match of a float graph with static activations."""
    if any(accepted.is_dynamic for slot in row.slots for accepted in slot.accepts):
        return False  # what is quantized at run time is moved in float
    if any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots):
        return False  # so is what stays float
    weights = [slot.at for slot in row.slots if slot.role is Role.WEIGHT]
    return row.refusal(match, allowed) is None and all(match.is_constant(at) for at in weights)


def _read_constants(regions: Regions) -> set[Node]:
    """Data movement of a constant."""
    return {
        anchor
        for anchor, (row, _) in regions.matches.items()
        if row.kind is OpKind.LIGHT and regions.constants & set(regions.inputs(anchor))
    }


def policy_of(table: OpTable) -> Policy:
    """The policy of an op table."""
    constant = Preference(name="constant_inputs", text="inputs that are no constants")
    return Policy(
        rows=table.rows,
        runs=runs_in_integers,
        at_output=lambda _: False,
        requantizes=True,
        exceptions=((constant, _read_constants),),
        others=(SLOWER,),
    )

"""Which matches the CPU's kernels take, and why one that fits is left."""

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import Slot
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.quantized_values import affine_of, read_weight, requantized
from pt2e_quant.kernels.read_scheme import scheme_of, slots_fit


def decide(gm: GraphModule, refused: dict[str, str]) -> Callable[[Kernel, Match], bool]:
    """A predicate for the matcher; why a match that fits is left goes to `refused`, by node."""
    return lambda kernel, match: _fits(gm, kernel, match, refused)


def _fits(gm: GraphModule, kernel: Kernel, match: Match, refused: dict[str, str]) -> bool:
    """Whether the q/dq around a match are the row's; why one that fits is left goes to `refused`.

    Ranges narrower than the row's, or of weights that use -128, are taken: what a foreign
    quantizer wrote runs too.
    """
    row = kernel.row
    takes_floats = any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots)
    if takes_floats and not slots_fit(gm, row, match):
        return False
    if not takes_floats and not all(_slot_fits(gm, match, slot) for slot in row.slots):
        return False
    broken = row.refusal(match)
    if broken is not None:
        refused.setdefault(match.anchor.name, f"{kernel.op} needs {broken.text}")
    return broken is None


def _slot_fits(gm: GraphModule, match: Match, slot: Slot) -> bool:
    at, role = slot.at, slot.role
    if any(accepted.is_dynamic for accepted in slot.accepts):
        found = scheme_of(gm, match[at])
        return found is not None and any(found.fits(accepted) for accepted in slot.accepts)
    if role is Role.WEIGHT:
        return match[at] is None or read_weight(gm, match[at]) is not None
    if role is Role.OUTPUT:
        written = requantized(match.anchor)
        return written is not None and written[0].dtype is torch.uint8
    if at == "y":  # a summand may be float
        return isinstance(match[at], Node)
    value = match[at]
    sources = value if isinstance(value, tuple) else (value,)
    affines = [affine_of(source) for source in sources]
    return all(affine is not None and affine.dtype is torch.uint8 for affine in affines)

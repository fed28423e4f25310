"""Operators that the CPU backend keeps float although oneDNN could run them in integers.

A max-pool or a cat on uint8 moves a quarter of the bytes; but away from convolutions and linears it
costs a quantize before it and a dequantize behind it. Products whose class of sizes measured slower
than float stay float as well, and so do those that `place_by_speed` timed.
"""

from collections.abc import Collection

from torch.fx import Node

from pt2e_quant.backends.target.policy import SLOWER, Policy, Regions, slower_preference
from pt2e_quant.core.recurrent_ops import Cell, Rounding, gate_count
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OpKind, OpRow, Preference
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Kernel
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.recurrent_layer.cpu import has_integer_layers
from pt2e_quant.kernels.registry import Registry
from pt2e_quant.passes.recurrent.split_recurrent import LayerSizes

SLOWER_KEY = "pt2e_quant.cpu.slower"
"""Key of an operator's `node.meta`: it was timed on this machine, and is slower in integers."""

_TIMED = frozenset({"int4_linear", "int8_conv2d", "int8_linear"})
"""Fused operators that were measured against float, by classes of sizes."""

_LEAST_LSTM = 2**18
"""Recurrent weights from which on torch's integer LSTM measured faster than oneDNN's float one: at
256 hidden values 1.0 to 1.5 times on one thread, at 512 1.6 to 3; at 128 0.7 times."""


def timed_kernels(registry: Registry) -> dict[str, Kernel]:
    """The kernels that were measured against float, by the names of their rows."""
    return {kernel.name: kernel for kernel in registry if kernel.op in _TIMED}


def policy_of(registry: Registry) -> Policy:
    """The policy for a registry's kernels."""
    kernels = timed_kernels(registry)

    def is_slower(row: OpRow, match: Match) -> bool:
        """Whether a match was timed as slower, or its class of sizes measured below float."""
        kernel = kernels.get(row.name)
        if kernel is None:
            return False
        if SLOWER_KEY in match.nodes["op"].meta:
            return True
        return measured_here(kernel.op).get(kernel.shape_class(match), 1.0) < 1.0

    return Policy(
        rows=[kernel.row for kernel in registry],
        runs=_runs,
        at_output=lambda _: False,
        requantizes=True,
        exceptions=(
            (
                Preference(name="constant_inputs", text="inputs that are no constants"),
                _read_constants,
            ),
        ),
        of_matches=(
            slower_preference(
                "leave it float, as layers so small gain nothing on this CPU, or quantize it "
                'all the same, with backend pq.backends.get("cpu").allowing_slower() '
                "(--allow-slower)",
                is_slower,
            ),
        ),
    )


def recurrent_form(
    sizes: LayerSizes, rounds_activations: bool, allowed: Collection[str]
) -> Rounding:
    """How a recurrent layer's operands are rounded where that is no slower than float."""
    has_integer_form = sizes.cell in (Cell.LSTM, Cell.GRU) and not sizes.has_projection
    if not rounds_activations or not has_integer_form or not has_integer_layers():
        return Rounding.NONE
    recurrent_weights = gate_count(sizes.cell) * sizes.hidden**2
    is_slower = sizes.cell is Cell.LSTM and recurrent_weights < _LEAST_LSTM
    return Rounding.NONE if is_slower and SLOWER not in allowed else Rounding.PER_TENSOR


def _runs(row: OpRow, match: Match) -> bool:
    """Whether an entry takes a match of a float graph with static activations."""
    if any(accepted.is_dynamic for slot in row.slots for accepted in slot.accepts):
        return False  # what is quantized at run time is moved in float
    if any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots):
        return False  # so is what stays float
    weights = [slot.at for slot in row.slots if slot.role is Role.WEIGHT]
    return row.refusal(match) is None and all(match.is_constant(at) for at in weights)


def _read_constants(regions: Regions) -> set[Node]:
    """Data movement of a constant."""
    return {
        anchor
        for anchor, (row, _) in regions.matches.items()
        if row.kind is OpKind.LIGHT and regions.constants & set(regions.inputs(anchor))
    }

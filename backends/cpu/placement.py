"""Which operators that only move data do so in integers.

A max-pool or a cat on uint8 moves a quarter of the bytes; but away from convolutions and linears it
costs a quantize before it and a dequantize behind it.
"""

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.cpu.table import TABLE
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.kernels.conditions import BETWEEN_INTEGERS, KEEP_FLOAT

__all__ = ["place_movers", "runs_in_integers"]

_REASON = "not between operators that take and give integers"


@graph_pass()
def place_movers(gm: GraphModule) -> PassResult:
    """Mark the moving operators that stay float.

    Before:  max_pool2d(relu(conv2d(…))) read by add
    After:   the same, the max_pool2d marked
    """
    for node in gm.graph.nodes:
        node.meta.pop(KEEP_FLOAT, None)
    matches = find_matches(gm.graph, TABLE.patterns(), runs_in_integers)
    made = _made_as_integers(gm, matches)
    read = _read_as_integers(matches, made)
    notes = []
    for row, match in matches:
        if _moves(row) and match.anchor not in made & read:
            match.anchor.meta[KEEP_FLOAT] = True
            notes.append(Note(match.anchor.name, _REASON, skipped=True))
    return PassResult(changed=False, notes=tuple(notes))


def runs_in_integers(row: OpRow, match: Match) -> bool:
    """Whether a row would take a match of a float graph with static activations."""
    if any(accepted.is_dynamic for slot in row.slots for accepted in slot.accepts):
        return False  # what is quantized at run time is moved in float
    if any(slot.role is Role.INPUT and not slot.accepts for slot in row.slots):
        return False  # so is what stays float
    weights = [slot.at for slot in row.slots if slot.role is Role.WEIGHT]
    return row.refusal(match) is None and all(match.is_constant(at) for at in weights)


def _moves(row: OpRow) -> bool:
    return BETWEEN_INTEGERS in row.constraints


def _inputs(row: OpRow, match: Match) -> list[Node]:
    names = [slot.at for slot in row.slots if slot.role is Role.INPUT]
    return [source for name in names for source, _ in match.edges(name)]


def _made_as_integers(gm: GraphModule, matches: list[tuple[OpRow, Match]]) -> set[Node]:
    """Values whose producer can give integers at no cost, inputs of the graph included."""
    found = {n for n in gm.graph.nodes if n.op == "placeholder" and _is_float(n)}
    for row, match in matches:  # in graph order: producers first
        if not _moves(row) or all(source in found for source in _inputs(row, match)):
            found.add(match.anchor)
    return found


def _read_as_integers(matches: list[tuple[OpRow, Match]], made: set[Node]) -> set[Node]:
    """Values that a convolution or linear takes, perhaps behind other moving operators."""
    found: set[Node] = set()
    for row, match in reversed(matches):
        if not _moves(row) or match.anchor in found & made:
            found.update(_inputs(row, match))
    return found


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

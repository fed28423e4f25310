"""The op-table entry of a recurrent layer; backends differ only in what it lowers to."""

from pt2e_quant.core.recurrent_ops import RecurrentLayer
from pt2e_quant.core.schemes import INT8_WEIGHT, Role
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.pattern import Match, Op, Var

_OPERANDS = ("x", "h0", "c0", "w_ih", "w_hh", "b_ih", "b_hh", "w_hr")
_WEIGHTS = ("w_ih", "w_hh", "w_hr")


def _is_constant(match: Match) -> bool:
    return all(match.is_constant(name) for name in ("b_ih", "b_hh"))


def recurrent_row(lowers_to: str, note: str, *needs: Constraint) -> OpRow:
    """A row for one layer: int8 weights; x and the hidden state are rounded by the operator.

    Args:
        lowers_to: the backend's operators.
        note: for the docs page.
        needs: constraints besides constant biases.
    """
    return OpRow(
        name="recurrent_layer",
        find=(Op(RecurrentLayer, *(Var(name) for name in _OPERANDS), name="op"),),
        slots=tuple(
            Slot(at=at, role=Role.WEIGHT, accepts=(INT8_WEIGHT,), narrows=True) for at in _WEIGHTS
        ),
        constraints=(Constraint(text="constant biases", holds=_is_constant), *needs),
        lowers_to=lowers_to,
        note=note,
    )

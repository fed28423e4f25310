"""Op-table entries of convolutions and linears with constant weights, for oneDNN's operators."""

from pt2e_quant.core.schemes import INT8_WEIGHT, UINT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import ADDS_EQUAL_SHAPES, ADDS_UNSCALED, LIMITS_ARE_LITERALS
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Overloads
from pt2e_quant.graph.pattern import Op, Var, chain, either_order, maybe

X, Y, W, B = Var("x"), Var("y"), Var("w"), Var("b")
_IN = Slot(at="x", role=Role.INPUT, accepts=(UINT8_ACTIVATION,))
ADDED = Slot(at="y", role=Role.INPUT, accepts=(UINT8_ACTIVATION,))
_WEIGHT = Slot(at="w", role=Role.WEIGHT, accepts=(INT8_WEIGHT,))
_NOTE = "the result is uint8 where what reads it takes that, else float"


def gemm_row(
    name: str, overloads: Overloads, post_ops: Overloads | None, lowers_to: str, *needs: Constraint
) -> OpRow:
    """A convolution or linear alone, or with an activation function fused."""
    alone = Op(overloads, X, W, B, name="op")
    return OpRow(
        name=name if post_ops is None else f"{name}_activation",
        find=(alone,) if post_ops is None else chain(alone, post_ops),
        slots=(_IN, _WEIGHT),
        constraints=needs if post_ops is None else (*needs, LIMITS_ARE_LITERALS),
        lowers_to=lowers_to,
        note=_NOTE,
    )


def sum_row(
    name: str,
    overloads: Overloads,
    lowers_to: str,
    *needs: Constraint,
    is_quantized: bool,
    note: str,
) -> OpRow:
    """A convolution or linear, a residual added to it, and perhaps a relu.

    Args:
        name: of the operator.
        overloads: of the operator.
        lowers_to: oneDNN's operator.
        needs: constraints besides those of every sum.
        is_quantized: whether the residual is quantized as well.
        note: for the docs page.
    """
    product = Op(overloads, X, W, B, name="op")
    return OpRow(
        name=f"{name}_add",
        find=chain(either_order(ops.ADD, product, Y, name="add"), maybe(ops.RELU, "clip")),
        slots=(_IN, _WEIGHT, ADDED) if is_quantized else (_IN, _WEIGHT),
        constraints=(*needs, ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to=lowers_to,
        note=note,
    )

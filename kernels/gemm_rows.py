"""Op-table entries of products with constant weights: alone, with an activation, with a sum."""

from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Overloads
from pt2e_quant.graph.pattern import Op, Var, chain, either_order, maybe

_X, _W, _B, _Y = Var("x"), Var("w"), Var("b"), Var("y")


def gemm_rows(
    name: str,
    overloads: Overloads,
    *,
    x: tuple[TensorScheme, ...],
    w: tuple[TensorScheme, ...],
    activations: Overloads,
    residual: tuple[TensorScheme, ...] | None,
    constraints: tuple[Constraint, ...],
    sum_constraints: tuple[Constraint, ...],
    lowers_to: str,
) -> tuple[OpRow, ...]:
    """One row alone, one with an activation, one with a sum and perhaps an activation behind it.

    The results have no slot: they are quantized where what reads them is.

    Args:
        name: of the first row; the others add to it.
        overloads: the operator: its first arguments are input, weight and bias.
        x: schemes of the activations; none for float.
        w: schemes of the weight.
        activations: what may follow.
        residual: schemes of the other summand, which may be float too; None for no such row.
        constraints: of every row.
        sum_constraints: of the row with the sum.
        lowers_to: the fused operator.
    """
    product = Op(overloads, _X, _W, _B, name="op")
    slots = (
        # With nothing to accept it says that x is float, which tells rows of equal weights apart.
        Slot(at="x", role=Role.INPUT, accepts=x),
        Slot(at="w", role=Role.WEIGHT, accepts=w),
    )
    note = "the result is quantized where what reads it takes that, else float"
    rows = [
        OpRow(
            name=name,
            find=(product,),
            slots=slots,
            constraints=constraints,
            lowers_to=lowers_to,
            note=note,
        ),
        OpRow(
            name=f"{name}_activation",
            find=chain(product, activations),
            slots=slots,
            constraints=constraints,
            lowers_to=lowers_to,
            note=note,
        ),
    ]
    if residual is not None:
        added = Slot(at="y", role=Role.INPUT, accepts=residual, is_optional=True)
        rows.append(
            OpRow(
                name=f"{name}_add",
                find=chain(
                    either_order(ops.ADD, product, _Y, name="add"), maybe(activations, "activation")
                ),
                slots=(*slots, *((added,) if residual else ())),
                constraints=(*constraints, *sum_constraints),
                lowers_to=lowers_to,
                note="the other summand is added before the result is rounded",
            )
        )
    return tuple(rows)

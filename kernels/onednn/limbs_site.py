"""Sites of float rows with integer weights: what a match needs, its class of sizes, the call."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.sum_lengths import LONGEST_SUM
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.onednn.limbs_op import limb_shifts
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.onednn.size_classes import sizes_of
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY
from pt2e_quant.kernels.site import Site


def class_of(form: str, rows: int | None, weight: int) -> str:
    """The class of a product of so many float rows by a weight of so many elements.

    Args:
        form: how the weight is scaled, "rows" or "groups".
        rows: None if their number is not known, not even of an example: the class is as fast as
            the slowest of its kind.
        weight: elements.

    >>> class_of("rows", 16, 768 * 768), class_of("groups", None, 2**22)
    ('float x, rows, weight < 2^20, M <= 16', 'float x, groups, weight >= 2^22, any M')
    """
    return f"float x, {form}, {sizes_of(rows, weight)}"


def _is_float32(match: Match) -> bool:
    value = match.node("x").meta.get("val")
    return value is not None and value.dtype is torch.float32


def _features_fit(match: Match) -> bool:
    return 1 <= int(match.node("w").meta["val"].shape[1]) <= LONGEST_SUM


_FLOAT32 = Constraint(
    text="float32 activations",
    holds=_is_float32,
    fix="leave it float: bfloat16 products are as fast",
)
_FEATURES = Constraint(text=f"1 to {LONGEST_SUM} input features", holds=_features_fit)


def linear_row(
    name: str,
    weights: tuple[TensorScheme, ...],
    *needs: Constraint,
    lowers_to: str = "pt2e_quant::linear_of_limbs",
    note: str = "activations are rounded to 16 bits of a row's largest, weights stay as they are",
) -> OpRow:
    """A linear of float rows; what follows it stays an operator of its own.

    Args:
        name: of the row.
        weights: the schemes it takes.
        needs: constraints besides those of every such row.
        lowers_to: the operators it becomes.
        note: for the docs page.
    """
    return OpRow(
        name=name,
        find=(Op(ops.LINEAR, Var("x"), Var("w"), Var("b"), name="op"),),
        slots=(
            # With nothing to accept it says that x is float.
            Slot(at="x", role=Role.INPUT, accepts=()),
            Slot(at="w", role=Role.WEIGHT, accepts=weights),
        ),
        constraints=(_FLOAT32, _FEATURES, *needs),
        lowers_to=lowers_to,
        note=note,
    )


def row_limbs(site: Site, weight: Node, scale: Tensor) -> tuple[Node | None, ...]:
    """The arguments of `linear_of_limbs` between x and the bias, for int8 weights per row."""
    like = site.match.nodes["op"]
    packed = site.editor.call(PackLinear, weight, None, like=like, before=site.place)
    return limb_operands(site, (packed, scale), None)


def limb_operands(
    site: Site, first: tuple[Node, Tensor], second: tuple[Node, Tensor] | None
) -> tuple[Node | None, ...]:
    """The operands of packed limbs, the high or only one first, each with its scales of rows."""
    zeros = site.constant("weight_zero_point", torch.zeros(len(first[1]), dtype=torch.int32))
    shifts = site.constant("limb_shifts", limb_shifts(site.source.meta["val"].dim()))
    found = first[0], site.constant("weight_scale", first[1]), zeros, shifts
    if second is None:
        return *found, None, None
    return *found, second[0], site.constant("weight_low_scale", second[1])


def call_linear(site: Site, target: Any, operands: tuple[Any, ...], shape_class: str) -> Node:
    """A call of x, what a weight is made of, and the bias, marked with its class of sizes."""
    bias, anchor = site.match.values.get("b"), site.match.anchor
    node = site.editor.call(
        target,
        site.editor.now(site.match.node("x")),
        *operands,
        site.editor.now(bias) if isinstance(bias, Node) else None,
        like=anchor,
        before=site.place,
        val=anchor.meta["val"],
    )
    node.meta[SHAPE_CLASS_KEY] = shape_class
    return node


def limbs_cost(x: Tensor, weights: Sequence[Tensor], out: Tensor) -> Cost:
    """Two products of integers for each limb of the weight."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, *weights, out),
        operations=4 * rows * sum(weight.numel() for weight in weights),
    )


def node_cost(node: Node) -> Cost:
    """The cost of a call of `linear_of_limbs` in a graph."""
    x, *weights = (found.meta["val"] for i in (0, 1, 5) if isinstance(found := node.args[i], Node))
    return limbs_cost(x, weights, node.meta["val"])

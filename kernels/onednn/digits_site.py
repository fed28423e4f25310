"""Where float rows meet integer weights: what a match needs, its class of sizes, the call."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import Role, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.meta import fake_cast
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.int8_linear.rows_op import onednn_is_exact
from pt2e_quant.kernels.onednn.digits_op import LinearOfDigits, digit_shifts, weight_digits
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY
from pt2e_quant.kernels.site import Site

__all__ = ["class_of", "linear_row", "multiply_digits", "node_cost", "rows_of", "two_digits"]

_ROWS = (1, 4, 16, 128)
_WEIGHTS = (18, 20)
_MOST_FEATURES = (2**31 - 1) // (255 * 128)
"""Of a sum in 32 bits."""


def rows_of(match: Match) -> int | None:
    """The rows of the product; None if a size is symbolic."""
    rows = 1
    for size in match.nodes["op"].meta["val"].shape[:-1]:
        if type(size) is not int:
            return None
        rows *= size
    return rows


def class_of(form: str, rows: int | None, weight: int) -> str:
    """The class of a product of so many float rows by a weight of so many elements.

    Args:
        form: how the weight is scaled, "rows" or "groups".
        rows: None if their number is known at run time only: the class is as fast as the slowest
            of its kind.
        weight: elements.

    >>> class_of("rows", 16, 768 * 768), class_of("groups", None, 2**22)
    ('float x, rows, weight < 2^20, M <= 16', 'float x, groups, weight >= 2^20, any M')
    """
    kind = next((f"< 2^{p}" for p in _WEIGHTS if weight < 2**p), f">= 2^{_WEIGHTS[-1]}")
    most = next((f"M <= {m}" for m in _ROWS if rows is not None and rows <= m), None)
    return f"float x, {form}, weight {kind}, " + (
        "any M" if rows is None else most or f"M > {_ROWS[-1]}"
    )


def _is_float32(match: Match) -> bool:
    value = match.node("x").meta.get("val")
    return value is not None and value.dtype is torch.float32


def _features_fit(match: Match) -> bool:
    return 1 <= int(match.node("w").meta["val"].shape[1]) <= _MOST_FEATURES


_FLOAT32 = Constraint(
    text="float32 activations",
    holds=_is_float32,
    fix="leave it float: bfloat16 products are as fast",
)
_FEATURES = Constraint(text=f"1 to {_MOST_FEATURES} input features", holds=_features_fit)
_EXACT = Constraint(
    text="exact sums of 8-bit products, which oneDNN has with VNNI",
    holds=lambda match: onednn_is_exact(),
)


def linear_row(name: str, weights: tuple[TensorScheme, ...], *needs: Constraint) -> OpRow:
    """A linear of float rows; what follows it stays an operator of its own.

    Args:
        name: of the row.
        weights: the schemes it takes.
        needs: constraints besides those of every such row.
    """
    return OpRow(
        name=name,
        find=(Op(ops.LINEAR, Var("x"), Var("w"), Var("b"), name="op"),),
        slots=(
            # With nothing to accept it says that x is float.
            Slot(at="x", role=Role.INPUT, accepts=()),
            Slot(at="w", role=Role.WEIGHT, accepts=weights),
        ),
        constraints=(_FLOAT32, _FEATURES, _EXACT, *needs),
        lowers_to="pt2e_quant::linear_of_digits",
        note="activations are rounded to 16 bits of a row's largest, weights stay as they are",
    )


def multiply_digits(
    site: Site, weight: Node, scale: Tensor, shape_class: Callable[[Match], str]
) -> Node:
    """`linear_of_digits` on int8 weights with a scale for each row."""
    return _call(site, (weight, scale), None, shape_class)


def two_digits(site: Site, real: Tensor, shape_class: Callable[[Match], str]) -> Node:
    """`linear_of_digits` on a weight that is rounded to 16 bits of its row's largest."""
    high, low, scale = weight_digits(real)
    parts = [
        (site.constant(f"weight_{name}", digit), factor)
        for name, digit, factor in (("high", high, scale * 256), ("low", low, scale))
    ]
    return _call(site, parts[0], parts[1], shape_class)


def _call(
    site: Site,
    first: tuple[Node, Tensor],
    second: tuple[Node, Tensor] | None,
    shape_class: Callable[[Match], str],
) -> Node:
    op = site.match.nodes["op"]
    bias = site.match.values.get("b")

    def packed(part: tuple[Node, Tensor], name: str) -> tuple[Node, Node]:
        weight, scale = part
        made = site.editor.call(PackLinear, weight, None, like=op, before=site.place)
        return made, site.constant(name, scale)

    weight, scale = packed(first, "weight_scale")
    zeros = site.constant("weight_zero_point", torch.zeros(len(first[1]), dtype=torch.int32))
    x = site.editor.now(site.match.node("x"))
    shifts = site.constant("digit_shifts", digit_shifts(x.meta["val"].dim()))
    low = (None, None) if second is None else packed(second, "weight_low_scale")
    bias = site.editor.now(bias) if isinstance(bias, Node) else None
    anchor = site.match.anchor
    node = site.editor.call(
        LinearOfDigits,
        *(x, weight, scale, zeros, shifts, *low, bias),
        like=anchor,
        before=site.place,
        val=fake_cast(anchor.meta["val"], torch.float32),
    )
    node.meta[SHAPE_CLASS_KEY] = shape_class(site.match)
    return node


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph: two products of integers for each digit of the weight."""
    x, weight = (node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]  # nodes by construction
    digits = 1 if node.args[5] is None else 2
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, *[weight] * digits, node.meta["val"]),
        operations=4 * digits * rows * weight.numel(),
    )

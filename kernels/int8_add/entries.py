"""What int8_add stands for in a canonical graph: a sum, difference or product."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Family, arguments, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, chain, maybe
from pt2e_quant.kernels.conditions import LIMITS_ARE_NUMBERS, QUANTIZED_RESULT, rank_of
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, operand_of, output_arguments
from pt2e_quant.kernels.int8_add.op import Int8Add, cost
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.shape_classes import by_elements
from pt2e_quant.kernels.site import Site

__all__ = ["KERNELS"]

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_FAMILIES: tuple[tuple[str, Family], ...] = (
    ("add", ops.ADD),
    ("sub", ops.SUB),
    ("mul", ops.MUL),
)


def _is_unscaled(match: Match) -> bool:
    return bool(arguments(match.nodes["op"]).get("alpha", 1) == 1)


def _takes_tensors(match: Match) -> bool:
    """Whether both operands are float tensors, as far as the graph says."""
    values = [n.meta.get("val") if isinstance(n, Node) else None for n in _operands(match)]
    return all(isinstance(v, Tensor) and v.dtype in _FLOATS for v in values)


def _is_image(match: Match) -> bool:
    """Whether integers go in already, or the result is of images.

    Quantizing a sum of a transformer's residual stream would cost accuracy and gain little.
    """
    return affine_of(match["x"]) is not None or rank_of(match.nodes["op"]) == 4


UNSCALED = Constraint(text="alpha == 1", holds=_is_unscaled)
TWO_TENSORS = Constraint(text="two float tensors", holds=_takes_tensors)
OF_IMAGES = Constraint(
    text="N, C, H, W inputs",
    holds=_is_image,
    fix="leave it float: it is bound by memory, and its range would round a residual stream",
)


def _operands(match: Match) -> tuple[Any, ...]:
    return match.nodes["op"].args[:2]


def build(site: Site) -> Node:
    """`int8_add` on the integers in front of the dequantizes, and on what is float."""
    op = site.match.nodes["op"]
    combine = next(name for name, family in _FAMILIES if is_call(op, family))
    (x, x_scale, x_zero), (y, y_scale, y_zero) = (
        operand_of(site, node) for node in _operands(site.match)
    )
    return site.call(
        Int8Add,
        x,
        y,
        combine=combine,
        x_scale=x_scale,
        x_zero_point=x_zero,
        y_scale=y_scale,
        y_zero_point=y_zero,
        **output_arguments(site),
    )


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
    x, y = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]  # nodes by construction
    return cost(x, y, node.meta["val"])


def _rows(name: str, family: Family) -> tuple[OpRow, ...]:
    """The first operand in int8, the second alone, or neither and an int8 result."""
    found = chain(Op(family, Var("x"), Var("y"), name="op"), maybe(ACTIVATIONS, "activation"))
    common = (UNSCALED, TWO_TENSORS, LIMITS_ARE_NUMBERS)
    integers = (INT8_ACTIVATION,)
    x, y = (Slot(at=at, role=Role.INPUT, accepts=integers) for at in ("x", "y"))
    float_x, float_y = (Slot(at=at, role=Role.INPUT, accepts=()) for at in ("x", "y"))
    out = Slot(at=OUT, role=Role.OUTPUT, accepts=integers, is_optional=True)

    def row(suffix: str, note: str, *slots: Slot, needs: tuple[Constraint, ...] = ()) -> OpRow:
        return OpRow(
            name=f"{name}{suffix}",
            find=found,
            slots=slots,
            constraints=(*common, *needs),
            lowers_to="pt2e_quant::int8_add",
            note=note,
        )

    other = replace(y, is_optional=True)
    return (
        row("", "the other operand and the result may be float", x, other, out, needs=(OF_IMAGES,)),
        row("_float_int8", "the result may be float", float_x, y),
        row(
            "_quantize",
            "of two float tensors, written as integers",
            float_x,
            float_y,
            needs=(QUANTIZED_RESULT,),
        ),
    )


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="int8_add",
        build=build,
        shape_class=by_elements,
        cost=node_cost,
    )
    for name, family in _FAMILIES
    for row in _rows(name, family)
)

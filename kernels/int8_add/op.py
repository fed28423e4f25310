"""The operator `pt2e_quant::int8_add`, and where a graph calls it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import ADDS_UNSCALED, FLOAT_OPERANDS, LIMITS_ARE_LITERALS, rank_of
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Overloads, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, chain, maybe
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, operand_of, output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_add import reference
from pt2e_quant.kernels.int8_add.broadcast import result_like
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import QUANTIZED_RESULT, affine_of
from pt2e_quant.kernels.shape_classes import by_elements
from pt2e_quant.kernels.site import Site


def _fake(x: Tensor, y: Tensor, *, out_dtype: torch.dtype = torch.float32, **named: Any) -> Tensor:
    return torch.empty_like(result_like(x, y), dtype=out_dtype)


Int8Add = define(
    'int8_add(Tensor x, Tensor y, *, str combine="add", float x_scale=1.0, int x_zero_point=0, '
    f"float y_scale=1.0, int y_zero_point=0, {OUTPUT_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_add,
    triton=triton_kernel("pt2e_quant.kernels.int8_add.gpu", "int8_add"),
    fake=_fake,
)
"""y = q(activation(dq(x) combined with dq(y))): in float32 between, and any end may be float.

    x, y: int8 or uint8 with their qparams, or a float dtype; they broadcast against each other.
    combine: "add", "sub" or "mul".
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

The result has the strides of the operand that has its shape, x's if both do.
"""


def cost(x: Tensor, y: Tensor, out: Tensor) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(x, y, out), operations=10 * out.numel())


_OPERATORS: tuple[tuple[str, Overloads], ...] = (
    ("add", ops.ADD),
    ("sub", ops.SUB),
    ("mul", ops.MUL),
)


def _is_image(match: Match) -> bool:
    """True if integers go in already, or the result is of images.

    Quantizing a sum of a transformer's residual stream would cost accuracy and gain little.
    """
    return affine_of(match["x"]) is not None or rank_of(match.nodes["op"]) == 4


OF_IMAGES = Constraint(
    text="integers that go in, or an N, C, H, W result",
    holds=_is_image,
    fix="leave it float: it is bound by memory, and its range would round a residual stream",
)


def _operands(match: Match) -> tuple[Any, ...]:
    return match.nodes["op"].args[:2]


def build(site: Site) -> Node:
    """`int8_add` on the integers in front of the dequantizes, and on what is float."""
    op = site.match.nodes["op"]
    combine = next(name for name, overloads in _OPERATORS if is_call(op, overloads))
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
    """The cost of a fused call in a graph."""
    x, y = (n.meta["val"] for n in node.args[:2])  # type: ignore[union-attr]  # nodes by construction
    return cost(x, y, node.meta["val"])


def _rows(name: str, overloads: Overloads) -> tuple[OpRow, ...]:
    """The first operand in int8, the second alone, or neither and an int8 result."""
    found = chain(Op(overloads, Var("x"), Var("y"), name="op"), maybe(ACTIVATIONS, "activation"))
    common = (ADDS_UNSCALED, FLOAT_OPERANDS, LIMITS_ARE_LITERALS)
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
    for name, overloads in _OPERATORS
    for row in _rows(name, overloads)
)

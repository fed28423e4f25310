"""The operator `pt2e_quant::int8_cat`, and where a graph calls it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import rank_of
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import argument
from pt2e_quant.graph.pattern import Many, Match, Op
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import operand_of, output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_cat import reference
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.shape_classes import static_product
from pt2e_quant.kernels.site import Site
from pt2e_quant.kernels.tiles import columns_class


def _fake(
    xs: Sequence[Tensor],
    dim: int,
    scales: Sequence[float],
    zero_points: Sequence[int],
    *,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return reference.empty_result(xs, dim, out_dtype)


Int8Cat = define(
    "int8_cat(Tensor[] xs, int dim, float[] scales, int[] zero_points, *, "
    f'{OUTPUT_SCHEMA}, str label="") -> Tensor',
    reference=reference.int8_cat,
    triton=triton_kernel("pt2e_quant.kernels.int8_cat.gpu", "int8_cat"),
    fake=_fake,
)
"""y = q(activation(cat(dq(x) for x in xs))): one launch for every four tensors.

    xs: int8 or uint8 with a scale and a zero point each, or float dtypes (1.0 and 0 then).
    dim: the axis; the other sizes are equal.
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

The result is channels-last if the first tensor is; what lies otherwise is copied first. A tensor
with the result's qparams keeps its integers.
"""


def cost(xs: Sequence[Tensor], out: Tensor) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(*xs, out), operations=10 * out.numel())


def _of_images(match: Match) -> bool:
    """True if integers go in already, or images do: a cache that grows is no place for ranges."""
    return all(affine_of(x) is not None for x in match["x"]) or rank_of(match.anchor) == 4


OF_IMAGES = Constraint(text="integers that go in, or N, C, H, W images", holds=_of_images)


def _dim(match: Match) -> int:
    return int(argument(match.nodes["op"], "dim"))


def build(site: Site) -> Node:
    """`int8_cat` on the integers in front of the dequantizes."""
    operands = [operand_of(site, node) for node in site.match["x"]]
    tensors, scales, zero_points = (list(values) for values in zip(*operands, strict=True))
    return site.call(
        Int8Cat, tensors, _dim(site.match), scales, zero_points, **output_arguments(site)
    )


def _class(match: Match) -> str:
    """The class by the size of the dimension that is last in memory, channels where they are."""
    value = match.anchor.meta["val"]
    dim = _dim(match) % value.dim()
    columns = value.shape[1:2] if value.dim() == 4 and dim == 1 else value.shape[dim:]
    known = static_product(columns)
    return "" if known is None else columns_class(known)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    xs: Any = node.args[0]
    return cost([x.meta["val"] for x in xs], node.meta["val"])


KERNELS = (
    Kernel(
        row=OpRow(
            name="cat",
            find=(Op(ops.CAT, Many("x"), name="op"),),
            slots=(
                Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
                Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,), is_optional=True),
            ),
            constraints=(OF_IMAGES,),
            lowers_to="pt2e_quant::int8_cat",
            note="every tensor keeps its own qparams; the result may be float",
        ),
        device=Device.CUDA,
        op="int8_cat",
        build=build,
        shape_class=_class,
        cost=node_cost,
    ),
)

"""What int8_cat stands for in a canonical graph."""

from typing import Any

from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import argument
from pt2e_quant.graph.pattern import Many, Match, Op
from pt2e_quant.kernels.conditions import rank_of
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.epilogue.read_graph import operand_of, output_arguments
from pt2e_quant.kernels.int8_cat.op import Int8Cat, cost
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.shape_classes import static_product
from pt2e_quant.kernels.site import Site
from pt2e_quant.kernels.tiles import columns_class

__all__ = ["KERNELS"]


def _of_images(match: Match) -> bool:
    """Whether integers go in already, or images do: a cache that grows is no place for ranges."""
    return all(affine_of(x) is not None for x in match["x"]) or rank_of(match.anchor) == 4


OF_IMAGES = Constraint(text="N, C, H, W inputs", holds=_of_images)


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
    """By the columns of the rows that the result is in memory: channels where they are last."""
    value = match.anchor.meta["val"]
    dim = _dim(match) % value.dim()
    columns = value.shape[1:2] if value.dim() == 4 and dim == 1 else value.shape[dim:]
    known = static_product(columns)
    return "" if known is None else columns_class(known)


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
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

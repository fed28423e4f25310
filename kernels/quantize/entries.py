"""What quantize stands for in a canonical graph: an activation function beside integers."""

from torch.fx import Node

from pt2e_quant.graph.op_table import Constraint, OpRow
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.kernels.conditions import LIMITS_ARE_NUMBERS
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, operand_of, output_arguments
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantize.op import Quantize, cost
from pt2e_quant.kernels.quantized_values import affine_of, rewritten
from pt2e_quant.kernels.shape_classes import by_elements
from pt2e_quant.kernels.site import Site

__all__ = ["KERNELS"]


def _is_beside_integers(match: Match) -> bool:
    return affine_of(match["x"]) is not None or rewritten(match.anchor) is not None


BESIDE_INTEGERS = Constraint(
    text="integers that go in, or a result that all its readers quantize alike",
    holds=_is_beside_integers,
)


def build(site: Site) -> Node:
    """`quantize` on the integers in front of the dequantize, or on the floats."""
    x, scale, zero_point = operand_of(site, site.match.node("x"))
    output = output_arguments(site)
    return site.call(Quantize, x, x_scale=scale, x_zero_point=zero_point, **output)


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
    return cost(node.args[0].meta["val"], node.meta["val"])  # type: ignore[union-attr]  # a node by construction


KERNELS = (
    Kernel(
        # No slots: a function alone gains nothing from integers, so no range is asked for here.
        row=OpRow(
            name="activation",
            find=(Op(ACTIVATIONS, Var("x"), name="op"),),
            slots=(),
            constraints=(BESIDE_INTEGERS, LIMITS_ARE_NUMBERS),
            lowers_to="pt2e_quant::quantize",
            note="dequantize, function and quantize in one launch, where they are there",
        ),
        device=Device.CUDA,
        op="quantize",
        build=build,
        shape_class=by_elements,
        cost=node_cost,
        writes_e4m3=True,
    ),
)

"""int8 weights under float activations on CPUs: two integer products instead of a float one."""

from torch.fx import Node

from pt2e_quant.core.schemes import INT8_WEIGHT
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs
from pt2e_quant.kernels.onednn.limbs_site import (
    call_linear,
    class_of,
    linear_row,
    node_cost,
    row_limbs,
)
from pt2e_quant.kernels.onednn.size_classes import expected_rows, weight_elements
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.quantized_values import read_weight
from pt2e_quant.kernels.site import Site


def shape_class(match: Match) -> str:
    """By the rows of the product and the size of the weight."""
    return class_of("rows", expected_rows(match), weight_elements(match))


def build(site: Site) -> Node:
    """`linear_of_limbs` on the stored integers."""
    weight = read_weight(site.gm, site.match["w"])
    assert weight is not None  # the row's scheme says so
    operands = row_limbs(site, site.integers("w"), weight.scale)
    return call_linear(site, LinearOfLimbs, operands, shape_class(site.match))


KERNELS = (
    Kernel(
        row=linear_row("linear_w8", (INT8_WEIGHT,)),
        device=Device.CPU,
        op="int8_linear",
        build=build,
        shape_class=shape_class,
        measured=measured_here("int8_linear"),
        cost=node_cost,
    ),
)

"""int8_linear on CPUs with activations quantized per token at run time."""

from dataclasses import replace

import torch
from torch.fx import Node

from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.epilogue.read_graph import epilogue_arguments
from pt2e_quant.kernels.int8_linear import op as unit
from pt2e_quant.kernels.int8_linear.cpu import node_cost
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows, sums_fit_float
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.exact_products import onednn_is_exact
from pt2e_quant.kernels.onednn.operators import PackLinear
from pt2e_quant.kernels.onednn.size_classes import expected_rows, sizes_of, weight_elements
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY, measured_here
from pt2e_quant.kernels.quantized_values import read_weight
from pt2e_quant.kernels.site import Site

_BY_INT_MM = "x per token, by torch._int_mm"
"""The class of what oneDNN's product would not be exact for."""


def class_of(rows: int | None, weight: int) -> str:
    """The class of a product of so many rows by a weight of so many elements.

    >>> class_of(1, 768 * 768), class_of(None, 2**22)
    ('x per token, weight < 2^20, M <= 1', 'x per token, weight >= 2^22, any M')
    """
    return f"x per token, {sizes_of(rows, weight)}"


def shape_class(match: Match) -> str:
    """By the rows of the product and the size of the weight."""
    return class_of(expected_rows(match), weight_elements(match))


def build(site: Site) -> Node:
    """`int8_linear_rows` on a packed weight where its sums are exact, else `int8_linear`."""
    weight = read_weight(site.gm, site.match["w"])
    assert weight is not None  # the row's scheme says so
    if not onednn_is_exact() or not sums_fit_float(weight.integers):
        plainly = unit.build(site)
        plainly.meta[SHAPE_CLASS_KEY] = _BY_INT_MM
        return plainly
    x, scale, zero_point = unit.read_activations(site)
    op = site.match.nodes["op"]
    plain = site.integers("w")
    packed = site.editor.call(PackLinear, plain, None, like=op, before=site.place)
    sums = weight.integers.sum(dim=1, dtype=torch.int32).float()
    made = site.call(
        Int8LinearRows,
        x,
        scale,
        zero_point,
        packed,
        site.constant("weight_scale", weight.scale),
        site.constant("weight_sum", sums),
        **epilogue_arguments(site),
    )
    made.meta[SHAPE_CLASS_KEY] = shape_class(site.match)
    return made


# Integers of 4 bits with a scale for each row are int8 ones: a file of half the size runs as fast.
_WEIGHTS = (unit.WEIGHT, replace(unit.WEIGHT, dtype=getattr(torch, "int4")))  # noqa: B009  # torch's stubs do not list it

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="int8_linear",
        build=build,
        shape_class=shape_class,
        measured=measured_here("int8_linear"),
        cost=node_cost,
    )
    for row in unit.linear_rows(
        "linear_dynamic",
        unit.PER_TOKEN,
        "pt2e_quant::int8_linear_rows",
        _WEIGHTS,
    )
)

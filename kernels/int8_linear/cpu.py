"""Linears with int8 weights on CPUs: of static, of dynamic and of float activations.

Static ones are oneDNN's fused product of uint8 activations. Dynamic ones have qparams per token.
Float ones are rounded to 16 bits: two integer products in place of a float one.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_WEIGHT_ONLY
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import CONSTANT_BIAS
from pt2e_quant.graph.pattern import Match, one_of
from pt2e_quant.graph.views import may_be_zero
from pt2e_quant.graph.views import sizes_of as sizes_as_arguments
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.read_graph import epilogue_arguments
from pt2e_quant.kernels.int8_linear import op as unit
from pt2e_quant.kernels.int8_linear.rows_op import Int8LinearRows, sums_fit_float
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn import limbs_site
from pt2e_quant.kernels.onednn.exact_products import multiplies_exactly
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs
from pt2e_quant.kernels.onednn.operators import LinearSum, PackLinear, QLinear, aten
from pt2e_quant.kernels.onednn.post_ops import CONV_POST_OPS
from pt2e_quant.kernels.onednn.rows import gemm_row, sum_row
from pt2e_quant.kernels.onednn.site import (
    FLOAT,
    Result,
    finish,
    known_sizes,
    read_operands,
)
from pt2e_quant.kernels.onednn.size_classes import expected_rows, sizes_of, weight_elements
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY, measured_here
from pt2e_quant.kernels.quantized_values import read_weight
from pt2e_quant.kernels.site import Site

POST_OPS = one_of(CONV_POST_OPS, ops.GELU, ops.LEAKY_RELU, ops.TANH)
_ROWS = (1, 16, 128)


def shape_class(match: Match) -> str:
    """The class by the rows of the product and the size of the weight."""
    return class_of(expected_rows(match), weight_elements(match))


def class_of(rows: int | None, weight: int) -> str:
    """The class of a product of so many rows by a weight of so many elements.

    Args:
        rows: None if their number is not known, not even of an example: the class is as fast as
            the slowest of its weight.
        weight: elements.

    >>> class_of(16, 768 * 768), class_of(None, 32 * 32)
    ('large weight, M <= 16', 'small weight, any M')
    """
    kind = "small" if weight < 64 * 64 else "large"
    most = next((f"M <= {m}" for m in _ROWS if rows is not None and rows <= m), f"M > {_ROWS[-1]}")
    return f"{kind} weight, {'any M' if rows is None else most}"


def build(site: Site) -> Node:
    """`qlinear_pointwise` on packed weights; what is added stays float."""
    found, result = read_operands(site), Result.of(site)
    op = site.match.nodes["op"]
    x = site.editor.call(
        aten.contiguous.default, found.x, like=op, before=site.place, val=found.x.meta["val"]
    )
    weight = site.constant("weight_q", found.weight.integers)
    packed = site.editor.call(PackLinear, weight, known_sizes(x), like=op, before=site.place)
    head = (
        x,
        found.affine.scale,
        found.affine.zero_point,
        packed,
        site.constant("weight_scale", found.weight.scale),
        site.constant("weight_zero_point", _zeros(found.weight.scale)),
    )
    if found.added is None:
        alone = (*head, found.bias, *result.described, *result.unary)
        made = finish(site, QLinear, alone, result, shape_class(site.match))
        return _shaped(site, made, x)
    summand = (FLOAT.scale, FLOAT.zero_point, "add", 1.0)
    args = (*head, found.added, found.bias, *result.described, *summand, *result.unary)
    return _shaped(site, finish(site, LinearSum, args, result, shape_class(site.match)), x)


def _shaped(site: Site, made: Node, x: Node) -> Node:
    """Give a result its shape where it may come to have no elements.

    oneDNN's product of torch 2.13 gives a matrix without rows then, whatever the dimensions.
    """
    sizes = x.meta["val"].shape[:-1]
    if len(sizes) == 1 or not any(map(may_be_zero, sizes)):
        return made
    place: dict[str, Any] = {"like": site.match.anchor, "before": site.place}
    shape = [*sizes_as_arguments(x, site.editor, **place)[:-1], made.meta["val"].shape[-1]]
    return site.editor.call(aten.reshape.default, made, shape, val=made.meta["val"], **place)


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros(scale.shape, dtype=torch.int32)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph; a packed weight has the bytes of the plain one."""
    x, weight = (node.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, weight, node.meta["val"]), operations=2 * rows * weight.numel()
    )


_NEEDS = (unit.SUMS_FIT, CONSTANT_BIAS)

_STATIC = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="int8_linear",
        build=build,
        shape_class=shape_class,
        measured=measured_here("int8_linear"),
        cost=node_cost,
    )
    for row in (
        gemm_row("linear", ops.LINEAR, None, "onednn.qlinear_pointwise", *_NEEDS),
        gemm_row("linear", ops.LINEAR, POST_OPS, "onednn.qlinear_pointwise", *_NEEDS),
        sum_row(
            "linear",
            ops.LINEAR,
            "onednn.qlinear_pointwise.binary",
            *_NEEDS,
            is_quantized=False,
            note="what is added stays float: it is a transformer's residual stream",
        ),
    )
)


_BY_INT_MM = "x per token, by torch._int_mm"
"""The class of what oneDNN's product would not be exact for."""


def dynamic_class_of(rows: int | None, weight: int) -> str:
    """The class of a product of rows quantized per token, as in `class_of`.

    >>> dynamic_class_of(1, 768 * 768), dynamic_class_of(None, 2**22)
    ('x per token, weight < 2^20, M <= 1', 'x per token, weight >= 2^22, any M')
    """
    return f"x per token, {sizes_of(rows, weight)}"


def dynamic_class(match: Match) -> str:
    """The class by the rows of the product and the size of the weight."""
    return dynamic_class_of(expected_rows(match), weight_elements(match))


def build_dynamic(site: Site) -> Node:
    """`int8_linear_rows` on a packed weight where its sums are exact, else `int8_linear`."""
    weight = read_weight(site.gm, site.match["w"])
    assert weight is not None  # the row's scheme says so
    if not multiplies_exactly(weight.integers) or not sums_fit_float(weight.integers):
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
    made.meta[SHAPE_CLASS_KEY] = dynamic_class(site.match)
    return made


# Integers of 4 bits with a scale for each row are int8 ones: a file of half the size runs as fast.
_WEIGHTS = (unit.WEIGHT, replace(unit.WEIGHT, dtype=getattr(torch, "int4")))  # noqa: B009  # torch's stubs do not list it

_DYNAMIC = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="int8_linear",
        build=build_dynamic,
        shape_class=dynamic_class,
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


def weight_only_class(match: Match) -> str:
    """The class by the rows of the product and the size of the weight."""
    return limbs_site.class_of("rows", expected_rows(match), weight_elements(match))


def build_weight_only(site: Site) -> Node:
    """`linear_of_limbs` on the stored integers."""
    weight = read_weight(site.gm, site.match["w"])
    assert weight is not None  # the row's scheme says so
    operands = limbs_site.row_limbs(site, site.integers("w"), weight.scale)
    return limbs_site.call_linear(site, LinearOfLimbs, operands, weight_only_class(site.match))


_WEIGHT_ONLY = Kernel(
    row=limbs_site.linear_row("linear_w8", (INT8_WEIGHT_ONLY,)),
    device=Device.CPU,
    op="int8_linear",
    build=build_weight_only,
    shape_class=weight_only_class,
    measured=measured_here("int8_linear"),
    cost=limbs_site.node_cost,
)

KERNELS = (*_STATIC, *_DYNAMIC, _WEIGHT_ONLY)

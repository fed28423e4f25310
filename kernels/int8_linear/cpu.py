"""int8_linear on CPUs: oneDNN's fused product of uint8 activations by int8 weights."""

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import CONSTANT_BIAS
from pt2e_quant.graph.pattern import Match, one_of
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.int8_linear.op import SUMS_FIT
from pt2e_quant.kernels.kernel import Device, Kernel
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
from pt2e_quant.kernels.onednn.size_classes import expected_rows, weight_elements
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.site import Site

POST_OPS = one_of(CONV_POST_OPS, ops.GELU, ops.LEAKY_RELU, ops.TANH)
_ROWS = (1, 16, 128)


def shape_class(match: Match) -> str:
    """By the rows of the product and the size of the weight."""
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
        return finish(site, QLinear, alone, result, shape_class(site.match))
    summand = (FLOAT.scale, FLOAT.zero_point, "add", 1.0)
    args = (*head, found.added, found.bias, *result.described, *summand, *result.unary)
    return finish(site, LinearSum, args, result, shape_class(site.match))


def _zeros(scale: Tensor) -> Tensor:
    return torch.zeros(scale.shape, dtype=torch.int32)


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph; a packed weight has the bytes of the plain one."""
    x, weight = (node.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, weight, node.meta["val"]), operations=2 * rows * weight.numel()
    )


_NEEDS = (SUMS_FIT, CONSTANT_BIAS)

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

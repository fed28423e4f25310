"""int8_conv2d and conv1d on CPUs: oneDNN's fused convolution of uint8, channels last."""

from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.ops import argument
from pt2e_quant.graph.pattern import Match, one_of
from pt2e_quant.kernels.conditions import BATCHED_1D, BATCHED_2D
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.int8_conv2d.read_conv import EVEN_PADDING, even_padding, per_axis
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.measured import read_measured
from pt2e_quant.kernels.onednn.operators import ConvSum, PackConv, QConv, aten
from pt2e_quant.kernels.onednn.post_ops import CONV_POST_OPS
from pt2e_quant.kernels.onednn.rows import gemm_row, sum_row
from pt2e_quant.kernels.onednn.site import (
    CONSTANT_BIAS,
    FLOAT,
    Operands,
    Result,
    finish,
    known_sizes,
    read_operands,
)
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site

__all__ = ["KERNELS", "shape_class"]


def shape_class(match: Match) -> str:
    """By what a filter sees: depthwise, pointwise, or several places of several channels."""
    groups = argument(match.nodes["op"], "groups")
    weight = match.node("w").meta["val"]
    if groups > 1:
        return "depthwise" if weight.shape[1] == 1 else "grouped"
    if all(size == 1 for size in weight.shape[2:]):
        return "pointwise"
    return "stem" if weight.shape[1] <= 4 else "spatial"


def build(site: Site) -> Node:
    """`qconv_pointwise` on packed weights, or the same with a sum."""
    found, result = read_operands(site), Result.of(site)
    conv = site.match.nodes["op"]
    x = _channels_last(site, found.x)
    geometry = (
        per_axis(conv, "stride"),
        even_padding(conv),
        per_axis(conv, "dilation"),
        argument(conv, "groups"),
    )
    scale = site.constant("weight_scale", found.weight.scale)
    packed = site.editor.call(
        PackConv,
        site.constant("weight_q", found.weight.integers),
        scale,
        found.affine.scale,
        found.affine.zero_point,
        *geometry,
        known_sizes(found.x),
        like=conv,
        before=site.place,
    )
    zeros = torch.zeros(found.weight.scale.shape, dtype=torch.int32)
    head = (
        x,
        found.affine.scale,
        found.affine.zero_point,
        packed,
        scale,
        site.constant("weight_zero_point", zeros),
    )
    if found.added is not None:
        return _summed(site, found, head, geometry, result)
    args = (*head, found.bias, *geometry, *result.described, *result.unary)
    return finish(site, QConv, args, result)


def _summed(
    site: Site, found: Operands, head: tuple[Any, ...], geometry: tuple[Any, ...], result: Result
) -> Node:
    """In integers where the other summand and the result are, else in float."""
    added, affine = found.added, affine_of(found.added)
    assert added is not None
    summand = FLOAT
    if not result.is_float and affine is not None and affine.dtype is torch.uint8:
        summand, added = affine, site.integers("y")
    else:
        result = Result(FLOAT, result.post_op, None)
    args = (
        *head,
        _channels_last(site, added),
        found.bias,
        *geometry,
        *result.described,
        summand.scale,
        summand.zero_point,
        "sum",
        1.0,
        *result.unary,
    )
    return finish(site, ConvSum, args, result)


def _channels_last(site: Site, value: Node) -> Node:
    """The value in channels-last order: nothing is copied where it has that already."""
    if value.meta["val"].dim() != 4 or value.target in (QConv, ConvSum):
        return value
    return site.editor.call(
        aten.contiguous.default,
        value,
        like=site.match.nodes["op"],
        before=site.place,
        val=value.meta["val"],
        memory_format=torch.channels_last,
    )


def node_cost(node: Node) -> Cost:
    """Of a fused call in a graph."""
    x, weight = (node.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    out = node.meta["val"]
    return Cost(bytes=moved_bytes(x, weight, out), operations=2 * out.numel() * weight[0].numel())


_NEEDS = (CONSTANT_BIAS, EVEN_PADDING)
_QCONV = "onednn.qconv_pointwise"

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="int8_conv2d",
        build=build,
        shape_class=shape_class,
        measured=read_measured("int8_conv2d", "cpu"),
        cost=node_cost,
    )
    for row in (
        gemm_row("conv1d", ops.CONV1D, None, _QCONV, BATCHED_1D, *_NEEDS),
        gemm_row("conv1d", ops.CONV1D, one_of(ops.RELU), _QCONV, BATCHED_1D, *_NEEDS),
        gemm_row("conv2d", ops.CONV2D, None, _QCONV, BATCHED_2D, *_NEEDS),
        gemm_row("conv2d", ops.CONV2D, CONV_POST_OPS, _QCONV, BATCHED_2D, *_NEEDS),
        sum_row(
            "conv2d",
            ops.CONV2D,
            "onednn.qconv2d_pointwise.binary",
            BATCHED_2D,
            *_NEEDS,
            is_quantized=True,
            note="a relu after the sum is fused",
        ),
    )
)

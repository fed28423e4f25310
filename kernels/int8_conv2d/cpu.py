"""int8_conv2d, conv1d and conv3d on CPUs: oneDNN's fused convolution of uint8, channels last."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import BATCHED_1D, BATCHED_2D, BATCHED_3D, CONSTANT_BIAS
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import CONV3D, argument, is_call
from pt2e_quant.graph.pattern import Match, one_of
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.int8_conv2d.read_conv import (
    EVEN_PADDING,
    SUMS_FIT,
    WINDOWS_MEET_IMAGE,
    even_padding,
    per_axis,
    weight_of,
)
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.operators import ConvSum, PackConv, QConv, aten
from pt2e_quant.kernels.onednn.post_ops import CONV_POST_OPS, NO_POST_OP
from pt2e_quant.kernels.onednn.rows import gemm_row, sum_row
from pt2e_quant.kernels.onednn.site import (
    FLOAT,
    Operands,
    Result,
    channels_last,
    finish,
    known_sizes,
    read_operands,
)
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site

_SIZES = (("small", 1 << 18), ("medium", 1 << 22))
"""Below so many multiplications an image; "large" from there."""
_GEMMS = ops.CONV + ops.LINEAR
_MADE_BY = (QConv, ConvSum)
_BETWEEN = CONV_POST_OPS + ops.LEAKY_RELU
"""Operators between two convolutions that still count as neighbours; q/dq count too."""


def shape_class(match: Match) -> str:
    """The class of a convolution: sizes of a filter and of an image's products, and its neighbours.

    "" where an image's size is symbolic; the batch may be.
    """
    conv = match.nodes["op"]
    weight = match.node("w").meta["val"]
    places = conv.meta["val"].shape[2:]
    if not all(isinstance(size, int) for size in places):
        return ""
    return class_of(
        tuple(weight.shape),
        groups=argument(conv, "groups"),
        places=math.prod(places),
        in_chain=_in_chain(match),
    )


def class_of(weight: tuple[int, ...], *, groups: int, places: int, in_chain: bool) -> str:
    """The class of a convolution's sizes.

    Args:
        weight: N, C / groups, then the kernel's sizes.
        groups: of channels.
        places: of the result, in one image.
        in_chain: between two convolutions: in float it would cost a quantize behind it.

    >>> class_of((96, 1, 3, 3), groups=96, places=56 * 56, in_chain=True)
    'depthwise, medium, in a chain'
    """
    if groups > 1:
        kind = "depthwise" if weight[1] == 1 else "grouped"
    elif all(size == 1 for size in weight[2:]):
        kind = "pointwise"
    else:
        kind = "stem" if weight[1] <= 4 else "spatial"
    if len(weight) > 4:
        kind = f"volume, {kind}"
    products = math.prod(weight) * places
    size = next((name for name, limit in _SIZES if products < limit), "large")
    return f"{kind}, {size}" + (", in a chain" if in_chain else "")


def _in_chain(match: Match) -> bool:
    source: object = match["x"]
    while isinstance(source, Node) and _is_between(source):
        source = source.args[0]
    if not isinstance(source, Node) or not (is_call(source, _GEMMS) or source.target in _MADE_BY):
        return False
    readers = list(match.anchor.users)
    while len(readers) == 1 and _is_between(readers[0]):
        readers = list(readers[0].users)
    return bool(readers) and all(is_call(reader, _GEMMS) for reader in readers)


def _is_between(node: Node) -> bool:
    return is_qdq(node) or is_call(node, _BETWEEN)


def build(site: Site) -> Node:
    """`qconv_pointwise` on packed weights, or the same with a sum."""
    found, result = read_operands(site), Result.of(site)
    conv = site.match.nodes["op"]
    x = channels_last(site, found.x)
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
    is_volume = is_call(conv, CONV3D)
    fused = replace(result, post_op=NO_POST_OP) if is_volume else result
    args = (*head, found.bias, *geometry, *fused.described, *fused.unary)
    made = finish(site, QConv, args, fused, shape_class(site.match))
    return made if fused.post_op is result.post_op else _at_least_zero(site, made, result)


def _at_least_zero(site: Site, made: Node, result: Result) -> Node:
    """A relu behind a convolution of volumes, for which oneDNN in torch has no post-op."""
    place: dict[str, Any] = {"like": site.match.anchor, "before": site.place}
    if result.is_float:
        return site.editor.call(aten.relu.default, made, val=made.meta["val"], **place)
    zero = result.affine.zero_point
    if not zero:  # what is below is cut off already
        return made
    return site.editor.call(aten.clamp_min.default, made, zero, val=made.meta["val"], **place)


def _summed(
    site: Site, found: Operands, head: tuple[Any, ...], geometry: tuple[Any, ...], result: Result
) -> Node:
    """The sum in integers where the other summand and the result are, else in float."""
    added, affine = found.added, affine_of(found.added)
    assert added is not None
    summand = FLOAT
    if not result.is_float and affine is not None and affine.dtype is torch.uint8:
        summand, added = affine, site.integers("y")
    else:
        result = Result(FLOAT, result.post_op, None)
    args = (
        *head,
        channels_last(site, added),
        found.bias,
        *geometry,
        *result.described,
        summand.scale,
        summand.zero_point,
        "sum",
        1.0,
        *result.unary,
    )
    return finish(site, ConvSum, args, result, shape_class(site.match))


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, weight = (node.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    out = node.meta["val"]
    return Cost(bytes=moved_bytes(x, weight, out), operations=2 * out.numel() * weight[0].numel())


_NEEDS = (
    SUMS_FIT,
    CONSTANT_BIAS,
    EVEN_PADDING,
    WINDOWS_MEET_IMAGE,
)
_NOT_DEPTHWISE = Constraint(
    # 20 to 40 times as long as in float.
    text="no depthwise convolution: oneDNN has no fast one of volumes",
    holds=lambda match: (
        weight_of(match.nodes["op"]).shape[1] > 1 or argument(match.nodes["op"], "groups") == 1
    ),
)
_OF_VOLUMES = (BATCHED_3D, _NOT_DEPTHWISE, *_NEEDS)
_QCONV = "onednn.qconv_pointwise"

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="int8_conv2d",
        build=build,
        shape_class=shape_class,
        measured=measured_here("int8_conv2d"),
        cost=node_cost,
    )
    for row in (
        gemm_row("conv1d", ops.CONV1D, None, _QCONV, BATCHED_1D, *_NEEDS),
        gemm_row("conv1d", ops.CONV1D, one_of(ops.RELU), _QCONV, BATCHED_1D, *_NEEDS),
        gemm_row("conv2d", ops.CONV2D, None, _QCONV, BATCHED_2D, *_NEEDS),
        gemm_row("conv2d", ops.CONV2D, CONV_POST_OPS, _QCONV, BATCHED_2D, *_NEEDS),
        gemm_row("conv3d", ops.CONV3D, None, _QCONV, *_OF_VOLUMES),
        gemm_row("conv3d", ops.CONV3D, one_of(ops.RELU), _QCONV, *_OF_VOLUMES),
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

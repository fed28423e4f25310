"""A constant weight of a canonical graph with a scale for each row or for each group of one."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.format_ops import DequantizeBlock
from pt2e_quant.core.qdq import STATIC_KINDS, kind_of_qdq, read_qparams
from pt2e_quant.graph.meta import constant_of


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Integers and qparams of a linear's weight.

    Args:
        integers: int8 or uint8[N, K].
        scale: float32, float16 or bfloat16[N, K / group_size].
        zero_point: int32[N, K / group_size], or None where all are zero.
        group_size: K for a scale per row.
    """

    integers: Tensor
    scale: Tensor
    zero_point: Tensor | None
    group_size: int


def read_grouped_weight(gm: GraphModule, node: Node) -> GroupedWeight | None:
    """The weight behind a dequantize; None if it is computed or its zero points are no integers."""
    source = node.args[0]
    integers = constant_of(gm, source) if isinstance(source, Node) else None
    if integers is None or integers.dim() != 2:
        return None
    found = _qparams(gm, node)
    if found is None:
        return None
    scale, zero_point = (None if t is None else t.reshape(len(integers), -1) for t in found)
    assert scale is not None
    if zero_point is not None:
        if zero_point.is_floating_point():
            return None
        zero_point = zero_point.to(torch.int32) if bool(zero_point.any()) else None
    group_size = integers.shape[1] // max(1, scale.shape[1])
    return GroupedWeight(integers, scale, zero_point, group_size)


def _qparams(gm: GraphModule, node: Node) -> tuple[Tensor, Tensor | None] | None:
    if kind_of_qdq(node) in STATIC_KINDS:
        qparams = read_qparams(gm, node)
        return qparams.scale, qparams.zero_point
    if node.target is not DequantizeBlock:
        return None
    scale, zero_point = (
        constant_of(gm, n) if isinstance(n, Node) else None for n in node.args[1:3]
    )
    return None if scale is None else (scale, zero_point)

"""4-bit weights under float activations on CPUs.

With a scale for each row, code - zero_point is an int8 weight as it is, and `linear_of_limbs`
takes it. With a scale for each group a few rows go through `linear_of_int4`, half a byte a weight.
For more rows the weight is rounded to 16 bits of its row's largest: two int8 weights, so two bytes
in memory (the file keeps 4 bits). Where their number is known at run time only, both are kept.
"""

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.granularity import PerGroup
from pt2e_quant.core.packing import pack
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.grouped_weight import GroupedWeight, read_grouped_weight
from pt2e_quant.kernels.int4_linear.any_rows_op import LinearOfGroups
from pt2e_quant.kernels.int4_linear.few_rows_op import (
    FEW_ROWS,
    UINT4,
    LinearOfInt4,
    PackInt4,
    scales_and_zeros,
)
from pt2e_quant.kernels.int4_linear.op import CODE_ZERO_POINTS, WEIGHTS
from pt2e_quant.kernels.int4_linear.pack import OFFSET
from pt2e_quant.kernels.int4_linear.pack_limbs_op import PackInt4Limbs, dequantize
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.limbs_op import LinearOfLimbs, weight_limbs
from pt2e_quant.kernels.onednn.limbs_site import (
    call_linear,
    class_of,
    limb_operands,
    limbs_cost,
    linear_row,
    node_cost,
    row_limbs,
)
from pt2e_quant.kernels.onednn.size_classes import expected_rows, rows_of, weight_elements
from pt2e_quant.kernels.onednn.speed import measured_here
from pt2e_quant.kernels.site import Site

_OP = "int4_linear"


def row_class(match: Match) -> str:
    """The class of a weight with a scale for each row."""
    return class_of("rows", expected_rows(match), weight_elements(match))


def group_class(match: Match) -> str:
    """The class of a weight with a scale for each group of a row."""
    return class_of("groups", expected_rows(match), weight_elements(match))


def build_rows(site: Site) -> Node:
    """`linear_of_limbs` on code - zero_point, from -15 to 15."""
    weight = _read(site)
    steps = weight.integers.to(torch.int32)
    if weight.zero_point is not None:
        steps = steps - weight.zero_point
    plain = site.constant("weight_int8", steps.to(torch.int8))
    operands = row_limbs(site, plain, weight.scale.reshape(-1).float())
    return call_linear(site, LinearOfLimbs, operands, row_class(site.match))


def build_groups(site: Site) -> Node:
    """`linear_of_int4` for a few rows, `linear_of_limbs` for more, both for an unknown number."""
    weight = _read(site)
    offset = OFFSET if weight.integers.dtype is torch.int8 else 0
    codes = (weight.integers.to(torch.int16) + offset).to(torch.uint8)
    pairs = site.constant("weight_codes", pack(codes, UINT4))
    zeros = torch.zeros_like(weight.scale, dtype=torch.int32)
    zeros = offset + (zeros if weight.zero_point is None else weight.zero_point)
    rows, name = rows_of(site.match), group_class(site.match)
    few = _few_rows(site, weight, pairs, zeros) if rows is None or rows <= FEW_ROWS else ()
    if rows is not None and rows <= FEW_ROWS:
        return call_linear(site, LinearOfInt4, few, name)
    limbs = _two_limbs(site, weight.scale.float(), pairs, zeros.to(torch.uint8))
    return call_linear(site, LinearOfGroups if few else LinearOfLimbs, (*few, *limbs), name)


def _read(site: Site) -> GroupedWeight:
    weight = read_grouped_weight(site.gm, site.match.node("w"))
    assert weight is not None  # a constraint says so
    return weight


def _few_rows(
    site: Site, weight: GroupedWeight, pairs: Node, zeros: Tensor
) -> tuple[Node | int, ...]:
    """The arguments of `linear_of_int4` between x and the bias."""
    packed = site.editor.call(PackInt4, pairs, like=site.source, before=site.place)
    scales = site.constant("scales_and_zeros", scales_and_zeros(weight.scale, zeros))
    return packed, weight.group_size, scales, len(weight.integers)


def _two_limbs(site: Site, scale: Tensor, pairs: Node, zeros: Tensor) -> tuple[Node | None, ...]:
    """The arguments of `linear_of_limbs` between x and the bias."""
    stored = pairs, site.constant("group_scale", scale), site.constant("group_zero_point", zeros)
    high, low = (
        site.editor.call(PackInt4Limbs, *stored, is_high, like=site.source, before=site.place)
        for is_high in (True, False)
    )
    codes = constant_of(site.gm, pairs)
    assert codes is not None  # made above
    _, _, step = weight_limbs(dequantize(codes, scale, zeros))
    return limb_operands(site, (high, step * 256), (low, step))


def group_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph; an unknown number of rows counts as many."""
    if node.target is LinearOfLimbs:
        return node_cost(node)
    x, packed, scales, *limbs = (
        found.meta["val"]
        for i in (0, 1, 3, 5, 9)
        if i < len(node.args) and isinstance(found := node.args[i], Node)
    )
    out = node.meta["val"]
    if node.target is LinearOfGroups:
        return limbs_cost(x, limbs[:2], out)
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, packed, scales, out),
        operations=2 * rows * out.shape[-1] * x.shape[-1],
    )


_GROUPED = tuple(w for w in WEIGHTS if isinstance(w.granularity, PerGroup))
_BY_ROW = tuple(w for w in WEIGHTS if w not in _GROUPED)

KERNELS = (
    Kernel(
        row=linear_row("linear_w4", _BY_ROW, CODE_ZERO_POINTS),
        device=Device.CPU,
        op=_OP,
        build=build_rows,
        shape_class=row_class,
        measured=measured_here(_OP),
        cost=node_cost,
    ),
    Kernel(
        row=linear_row(
            "linear_w4_groups",
            _GROUPED,
            CODE_ZERO_POINTS,
            lowers_to="pt2e_quant::linear_of_int4, linear_of_limbs or linear_of_groups",
            note="up to 4 rows in bfloat16; else activations are rounded to 16 bits of a row's "
            "largest, weights to 16 bits of theirs",
        ),
        device=Device.CPU,
        op=_OP,
        build=build_groups,
        shape_class=group_class,
        measured=measured_here(_OP),
        cost=group_cost,
    ),
)

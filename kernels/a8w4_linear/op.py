"""The operator `pt2e_quant::a8w4_linear`, and where a graph calls it."""

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES, ScaleFormat
from pt2e_quant.core.granularity import Granularity, PerChannel, PerGroup, PerToken
from pt2e_quant.core.schemes import INT8_ACTIVATION, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import ADDS_EQUAL_SHAPES, ADDS_UNSCALED, LIMITS_ARE_LITERALS
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.a8w4_linear import reference
from pt2e_quant.kernels.a8w4_linear.pack import half_of, pack_halves, weight_sums
from pt2e_quant.kernels.a8w4_linear.tile_class import tile_class
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, epilogue_arguments
from pt2e_quant.kernels.fused_op import define, fake_linear, triton_kernel
from pt2e_quant.kernels.gemm_rows import gemm_rows
from pt2e_quant.kernels.grouped_weight import read_grouped_weight
from pt2e_quant.kernels.int4_linear.op import GROUP_SIZES
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.shape_classes import static_product
from pt2e_quant.kernels.site import Site

A8w4Linear = define(
    "a8w4_linear(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    f"Tensor weight_scale, Tensor weight_sum, int group_size, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.a8w4_linear,
    triton=triton_kernel("pt2e_quant.kernels.a8w4_linear.gpu", "a8w4_linear"),
    fake=fake_linear(weight=3, axis=1),
)
"""y = epilogue(x_scale * (sum over runs of k: scale of the group * sum_k x * weight  -  zero point
* sum_k of the scaled weights)), the sum over k of (x - zero point) times the scaled weights.

    x: int8[..., K], contiguous.
    x_scale, x_zero_point: float32 and int32 of one element, or of M, one a row (M rows in all).
    weight: int8[ceil(K / 2 h), N, h], 4-bit integers as `pack.pack_halves` lays them out; h is
        `pack.half_of(group_size, K)`.
    weight_scale: float32, float16 or bfloat16[K / group_size, N].
    weight_sum: float32[N], `pack.weight_sums`: what a zero point of 1 takes off.
    group_size: 32, 64, a multiple of 128, or K.
    label: the node and layout, for the profiler.
"""


def cost(x: Tensor, weight: Tensor, weight_scale: Tensor, weight_sum: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, weight_scale, weight_sum, out) + 8 * rows,
        operations=2 * rows * weight.shape[1] * K,
    )


_GRANULARITIES: tuple[Granularity, ...] = (
    PerChannel(0),
    *(PerGroup(size) for size in GROUP_SIZES),
)
_WEIGHTS = tuple(
    TensorScheme(
        dtype=getattr(torch, "int4"),  # noqa: B009  # torch's type stubs do not list it
        granularity=granularity,
        symmetric=True,
        scales=scales,
    )
    for scales in (FLOAT32_SCALES, *(ScaleFormat(dtype=d) for d in (torch.float16, torch.bfloat16)))
    for granularity in _GRANULARITIES
)
_PER_TOKEN = TensorScheme(
    dtype=torch.int8, granularity=PerToken(), symmetric=False, is_dynamic=True
)


def build(site: Site) -> Node:
    """`a8w4_linear` on the integers in front of the dequantizes."""
    found = read_grouped_weight(site.gm, site.match.node("w"))
    assert found is not None  # the row's scheme says so
    K, size = found.integers.shape[1], found.group_size
    packed = pack_halves(found.integers, half_of(size, K))
    weight_scale = found.scale.t().contiguous()
    scale, zero_point = _qparams(site)
    return site.call(
        A8w4Linear,
        site.integers("x"),
        scale,
        zero_point,
        site.constant("weight_packed", packed),
        site.constant("weight_scale", weight_scale),
        site.constant("weight_sum", weight_sums(found.integers, weight_scale, size)),
        size,
        **epilogue_arguments(site),
    )


def _qparams(site: Site) -> tuple[Node, Node]:
    """Scales and zero points of x: of one element or of one a row."""
    affine = affine_of(site.match["x"])
    if affine is None:
        return site.chosen_qparams("x")
    return (
        site.constant("x_scale", torch.tensor([affine.scale], dtype=torch.float32)),
        site.constant("x_zero_point", torch.tensor([affine.zero_point], dtype=torch.int32)),
    )


def shape_class(match: Match) -> str:
    """The class by the rows of the product; "" if one is symbolic."""
    rows = static_product(match.nodes["op"].meta["val"].shape[:-1])
    return "" if rows is None else tile_class(rows)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, weight, scale, sums = (node.args[i].meta["val"] for i in (0, 3, 4, 5))  # type: ignore[union-attr]  # nodes by construction
    return cost(x, weight, scale, sums, node.meta["val"])


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="a8w4_linear",
        build=build,
        shape_class=shape_class,
        cost=node_cost,
    )
    for name, x in (("linear_a8w4", INT8_ACTIVATION), ("linear_a8w4_dynamic", _PER_TOKEN))
    for row in gemm_rows(
        name,
        ops.LINEAR,
        x=(x,),
        w=_WEIGHTS,
        activations=ACTIVATIONS,
        residual=(INT8_ACTIVATION,),
        constraints=(LIMITS_ARE_LITERALS,),
        sum_constraints=(ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to="pt2e_quant::a8w4_linear",
    )
)

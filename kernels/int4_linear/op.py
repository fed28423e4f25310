"""The operator `pt2e_quant::int4_linear`, and where a graph calls it."""

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.formats.scale_format import FLOAT32_SCALES, ScaleFormat
from pt2e_quant.core.granularity import Granularity, PerChannel, PerGroup
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.schemes import INT8_ACTIVATION, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import ADDS_EQUAL_SHAPES, ADDS_UNSCALED, LIMITS_ARE_LITERALS
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.pattern import Match
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, epilogue_arguments
from pt2e_quant.kernels.fused_op import define, fake_linear, triton_kernel
from pt2e_quant.kernels.gemm_rows import gemm_rows
from pt2e_quant.kernels.grouped_weight import GroupedWeight, read_grouped_weight
from pt2e_quant.kernels.int4_linear import reference
from pt2e_quant.kernels.int4_linear.pack import OFFSET, pack_codes
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.shape_classes import by_rows
from pt2e_quant.kernels.site import Site

Int4Linear = define(
    "int4_linear(Tensor x, Tensor weight, Tensor scale, Tensor? zero_point, int group_size, *, "
    f'{EPILOGUE_SCHEMA}, str label="") -> Tensor',
    reference=reference.int4_linear,
    triton=triton_kernel("pt2e_quant.kernels.int4_linear.gpu", "int4_linear"),
    fake=fake_linear(weight=1, axis=1),
)
"""y = epilogue(sum_k x * (code - zero_point) * scale), with the group of k's scale.

    x: float16, bfloat16 or float32[..., K], finite.
    weight: int32[ceil(K / 128), N, 16], codes from 0 to 15 as `pack.pack_codes` lays them out.
    scale: float16, bfloat16 or float32[K / group_size, N].
    zero_point: uint8[K / group_size, N], codes; None for 8 everywhere (symmetric weights).
    group_size: 32, 64, a multiple of 128, or K.
    label: the node and layout, for the profiler.

Kernels are within `reference.error_bound` of the definition.
"""


def cost(x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations.

    In groups of 128 a weight is 0.516 bytes with a 16-bit scale, 0.523 with a zero point.
    """
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, scale, zero_point, out),
        operations=2 * rows * weight.shape[1] * K,
    )


GROUP_SIZES = (32, 64, 128)
"""Group sizes of recipes; the operator takes any multiple of 128 too."""

_INT4, _UINT4 = (getattr(torch, name) for name in ("int4", "uint4"))  # torch's stubs list neither
_GRANULARITIES: tuple[Granularity, ...] = (PerChannel(0), *(PerGroup(size) for size in GROUP_SIZES))
_HALF_SCALES = tuple(ScaleFormat(dtype=d) for d in (torch.float16, torch.bfloat16))
WEIGHTS = tuple(
    TensorScheme(dtype=dtype, granularity=granularity, symmetric=False, scales=scales)
    for dtype, kinds in ((_INT4, (FLOAT32_SCALES, *_HALF_SCALES)), (_UINT4, (FLOAT32_SCALES,)))
    for scales in kinds
    for granularity in _GRANULARITIES
)


def _has_code_zero_points(match: Match) -> bool:
    """True if zero points are codes too; where nothing is quantized yet there are none."""
    node, gm = match.node("w"), match.anchor.graph.owning_module
    assert isinstance(gm, GraphModule)
    if not is_dequantize(node):
        return True
    weight = read_grouped_weight(gm, node)
    if weight is None or weight.zero_point is None:
        return weight is not None
    low, high = (-8, 7) if weight.integers.dtype is torch.int8 else (0, 15)
    return bool(((weight.zero_point >= low) & (weight.zero_point <= high)).all())


CODE_ZERO_POINTS = Constraint(
    text="zero points that are 4-bit integers", holds=_has_code_zero_points
)


def build(site: Site) -> Node:
    """`int4_linear` on the packed codes of the weight."""
    weight = read_grouped_weight(site.gm, site.match.node("w"))
    assert weight is not None  # a constraint says so
    offset = OFFSET if weight.integers.dtype is torch.int8 else 0
    codes = (weight.integers.to(torch.int16) + offset).to(torch.uint8)
    zero_point = _zero_codes(weight, offset)
    zeros = None if zero_point is None else site.constant("weight_zero_point", zero_point)
    return site.call(
        Int4Linear,
        site.editor.now(site.match.node("x")),
        site.constant("weight_packed", pack_codes(codes)),
        site.constant("weight_scale", weight.scale.t().contiguous()),
        zeros,
        weight.group_size,
        **epilogue_arguments(site),
    )


def _zero_codes(weight: GroupedWeight, offset: int) -> Tensor | None:
    """Zero points as codes, uint8[K / group_size, N]; None where all are 8."""
    zeros = torch.zeros(weight.scale.shape, dtype=torch.int32, device=weight.scale.device)
    if weight.zero_point is not None:
        zeros = weight.zero_point
    codes = zeros + offset
    if bool((codes == OFFSET).all()):
        return None
    return codes.to(torch.uint8).t().contiguous()


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, weight, scale = (node.args[i].meta["val"] for i in range(3))  # type: ignore[union-attr]  # nodes by construction
    zeros = node.args[3]
    zero_point = zeros.meta["val"] if isinstance(zeros, Node) else None
    return cost(x, weight, scale, zero_point, node.meta["val"])


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="int4_linear",
        build=build,
        shape_class=by_rows,
        cost=node_cost,
    )
    for row in gemm_rows(
        "linear_int4",
        ops.LINEAR,
        x=(),
        w=WEIGHTS,
        activations=ACTIVATIONS,
        residual=(INT8_ACTIVATION,),
        constraints=(
            CODE_ZERO_POINTS,
            LIMITS_ARE_LITERALS,
        ),
        sum_constraints=(ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to="pt2e_quant::int4_linear",
    )
)

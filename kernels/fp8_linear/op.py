"""The operator `pt2e_quant::fp8_linear`, and where a graph calls it."""

from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.formats.number_formats import FP8_E4M3
from pt2e_quant.core.granularity import Granularity, PerChannel, PerTensor, PerToken
from pt2e_quant.core.schemes import INT8_ACTIVATION, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import ADDS_EQUAL_SHAPES, ADDS_UNSCALED, LIMITS_ARE_LITERALS
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, epilogue_arguments
from pt2e_quant.kernels.fp8_linear import reference
from pt2e_quant.kernels.fused_op import define, fake_linear, triton_kernel
from pt2e_quant.kernels.gemm_rows import gemm_rows
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.launch import FP8_CAPABILITY
from pt2e_quant.kernels.shape_classes import by_rows
from pt2e_quant.kernels.site import Site

Fp8Linear = define(
    "fp8_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, *, "
    f'{EPILOGUE_SCHEMA}, str label="") -> Tensor',
    reference=reference.fp8_linear,
    triton=triton_kernel("pt2e_quant.kernels.fp8_linear.gpu", "fp8_linear"),
    fake=fake_linear(weight=2, axis=0),
)
"""y = epilogue(sum_k x * weight, times weight_scale, times x_scale).

    x: float8_e4m3fn[..., K].
    x_scale: float32 of one element, or of M, one a row (M rows in all).
    weight: float8_e4m3fn[N, K].
    weight_scale: float32 of one element, or of N.
    label: the node and layout, for the profiler.

On a GPU the sums are within `reference.error_bound` of the definition.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    K = x.shape[-1]
    rows = x.numel() // max(1, K)
    return Cost(
        bytes=moved_bytes(x, weight, out) + 4 * (rows + weight.shape[0]),
        operations=2 * rows * weight.shape[0] * K,
    )


def _e4m3(granularity: Granularity, *, is_dynamic: bool = False) -> TensorScheme:
    return TensorScheme(
        dtype=FP8_E4M3.code_dtype,
        granularity=granularity,
        symmetric=True,
        is_dynamic=is_dynamic,
        format=FP8_E4M3,
    )


_ACTIVATIONS = (
    _e4m3(PerTensor()),
    _e4m3(PerToken(), is_dynamic=True),
    _e4m3(PerTensor(), is_dynamic=True),
)
_WEIGHTS = (_e4m3(PerChannel(0)), _e4m3(PerTensor()))


def build(site: Site) -> Node:
    """`fp8_linear` on the codes and scales in front of the dequantizes."""
    return site.call(
        Fp8Linear,
        site.integers("x"),
        _scale(site, "x"),
        site.integers("w"),
        _scale(site, "w"),
        **epilogue_arguments(site),
    )


def _scale(site: Site, name: str) -> Node:
    scale = site.match.node(name).args[1]
    assert isinstance(scale, Node)  # of dequantize_float, by its schema
    return site.editor.now(scale)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, weight = (node.args[i].meta["val"] for i in (0, 2))  # type: ignore[union-attr]  # nodes by construction
    return cost(x, weight, node.meta["val"])


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="fp8_linear",
        build=build,
        shape_class=by_rows,
        cost=node_cost,
        writes_e4m3=True,
        lowest_capability=FP8_CAPABILITY,
    )
    for row in gemm_rows(
        "linear_fp8",
        ops.LINEAR,
        x=_ACTIVATIONS,
        w=_WEIGHTS,
        activations=ACTIVATIONS,
        residual=(INT8_ACTIVATION,),
        constraints=(LIMITS_ARE_LITERALS,),
        sum_constraints=(ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to="pt2e_quant::fp8_linear",
    )
)

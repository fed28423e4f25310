"""The operator `pt2e_quant::int8_linear`, and where a graph calls it."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.granularity import PerChannel, PerTensor, PerToken
from pt2e_quant.core.schemes import INT8_ACTIVATION, TensorScheme
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import (
    ADDS_EQUAL_SHAPES,
    ADDS_UNSCALED,
    CONSTANT_BIAS,
    LIMITS_ARE_LITERALS,
)
from pt2e_quant.graph.op_table import Constraint, OpRow
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.sum_lengths import LONGEST_SUM
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import ACTIVATIONS, epilogue_arguments
from pt2e_quant.kernels.fused_op import define, fake_linear, triton_kernel
from pt2e_quant.kernels.gemm_rows import gemm_rows
from pt2e_quant.kernels.int8_linear import multiply_cpu, reference
from pt2e_quant.kernels.int8_linear.product_class import product_class
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of, read_weight
from pt2e_quant.kernels.site import Site

Int8Linear = define(
    "int8_linear(Tensor x, Tensor x_scale, Tensor x_zero_point, Tensor weight, "
    f"Tensor weight_scale, Tensor weight_sum, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_linear,
    triton=triton_kernel("pt2e_quant.kernels.int8_linear.gpu", "int8_linear"),
    fake=fake_linear(weight=3, axis=0),
    cpu=multiply_cpu.int8_linear,
)
"""y = epilogue(sum_k (x - x_zero_point) * weight, times x_scale * weight_scale).

    x: int8[..., K], contiguous.
    x_scale, x_zero_point: float32 and int32, [1], or [M] for one a row (M rows in all).
    weight: int8[N, K], contiguous; its zero point is 0.
    weight_scale: float32[N].
    weight_sum: int32[N], the sum of each row of weight.
    label: the node and layout, for the profiler.
"""


def cost(x: Tensor, weight: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    rows = x.numel() // max(1, x.shape[-1])
    return Cost(
        bytes=moved_bytes(x, weight, out) + 8 * weight.shape[0],
        operations=2 * rows * weight.shape[0] * weight.shape[1],
    )


WEIGHT = TensorScheme(dtype=torch.int8, granularity=PerChannel(0), symmetric=True)
PER_TOKEN = TensorScheme(dtype=torch.int8, granularity=PerToken(), symmetric=False, is_dynamic=True)
_PER_TENSOR = replace(PER_TOKEN, granularity=PerTensor())


def _sums_fit(match: Match) -> bool:
    weight: Node = match["w"]
    return int(weight.meta["val"].shape[-1]) <= LONGEST_SUM


SUMS_FIT = Constraint(text=f"at most {LONGEST_SUM} input features", holds=_sums_fit)
"""Sums of products of 8 bits that int32 holds: matrix units wrap around, or saturate."""


def shape_class(match: Match) -> str:
    """The class by the rows and columns of the product; "" if one is symbolic."""
    *shape, columns = match.nodes["op"].meta["val"].shape
    rows = 1
    for size in shape:
        if not isinstance(size, int):
            return ""
        rows *= size
    return product_class(rows, columns)


def build(site: Site) -> Node:
    """`int8_linear` on the integers in front of the dequantizes."""
    x, scale, zero_point = read_activations(site)
    weight = read_weight(site.gm, site.match["w"])
    assert weight is not None  # the row's scheme says so
    sums = weight.integers.sum(dim=1, dtype=torch.int32)
    return site.call(
        Int8Linear,
        x,
        scale,
        zero_point,
        site.integers("w"),
        site.constant("weight_scale", weight.scale),
        site.constant("weight_sum", sums),
        **epilogue_arguments(site),
    )


def read_activations(site: Site) -> tuple[Node, Node, Node]:
    """The integers of x with their scales and zero points, of one element or of one a row."""
    affine = affine_of(site.match["x"])
    if affine is not None:
        scale = torch.tensor([affine.scale], dtype=torch.float32)
        zero_point = torch.tensor([affine.zero_point], dtype=torch.int32)
        return (
            site.integers("x"),
            site.constant("x_scale", scale),
            site.constant("x_zero_point", zero_point),
        )
    return site.integers("x"), *site.chosen_qparams("x")


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, weight = (node.args[i].meta["val"] for i in (0, 3))  # type: ignore[union-attr]  # nodes by construction
    return cost(x, weight, node.meta["val"])


_COMMON = (
    SUMS_FIT,
    LIMITS_ARE_LITERALS,
    CONSTANT_BIAS,
)


def linear_rows(
    name: str,
    x: TensorScheme,
    lowers_to: str,
    weights: tuple[TensorScheme, ...] = (WEIGHT,),
) -> tuple[OpRow, ...]:
    """Linears on activations of one scheme: alone, with an activation, with a sum.

    Args:
        name: of the first row.
        x: the activations' scheme.
        lowers_to: the fused operator.
        weights: their schemes.
    """
    return gemm_rows(
        name,
        ops.LINEAR,
        x=(x,),
        w=weights,
        activations=ACTIVATIONS,
        # The other summand is a transformer's residual stream, which rounding would wear out.
        residual=(),
        constraints=_COMMON,
        sum_constraints=(ADDS_UNSCALED, ADDS_EQUAL_SHAPES),
        lowers_to=lowers_to,
    )


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="int8_linear",
        build=build,
        shape_class=shape_class,
        cost=node_cost,
    )
    for name, x in (
        ("linear", INT8_ACTIVATION),
        ("linear_dynamic", PER_TOKEN),
        ("linear_dynamic_per_tensor", _PER_TENSOR),
    )
    for row in linear_rows(name, x, "pt2e_quant::int8_linear")
)

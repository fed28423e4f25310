"""The operator `pt2e_quant::int8_matmul`, and where a graph calls it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.integer import longest_inner_axis
from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.idioms.shared_heads import repeats_heads
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.ops import argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import EPILOGUE_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_matmul import reference
from pt2e_quant.kernels.int8_matmul.batches import read_batches
from pt2e_quant.kernels.int8_matmul.product_class import product_class
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site

_SWAPS = (aten.transpose.int, aten.swapaxes.default)


def swaps_last_axes(node: Node) -> bool:
    """True if a permutation swaps the last two axes and moves no other."""
    rank = node.meta["val"].dim()
    if node.target is aten.mT.default:
        return True
    if node.target in _SWAPS:
        axes = {int(axis) % rank for axis in node.args[1:3]}  # type: ignore[arg-type]  # integers by schema
        return rank >= 2 and axes == {rank - 2, rank - 1}
    if node.target is aten.permute.default:
        order = [int(axis) % rank for axis in node.args[1]]  # type: ignore[union-attr,arg-type]  # by schema
        return rank >= 2 and order == [*range(rank - 2), rank - 1, rank - 2]
    return False


def _fake(
    left: Tensor,
    right: Tensor,
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    batches = read_batches(left.shape, right.shape)
    return left.new_empty((*batches.shape, left.shape[-2], right.shape[-1]), dtype=out_dtype)


Int8Matmul = define(
    "int8_matmul(Tensor left, Tensor right, float scale, int left_zero_point, "
    f"int right_zero_point, *, {EPILOGUE_SCHEMA}, "
    'str label="") -> Tensor',
    reference=reference.int8_matmul,
    triton=triton_kernel("pt2e_quant.kernels.int8_matmul.gpu", "int8_matmul"),
    fake=_fake,
)
"""y = epilogue(scale * sum_k (left - left_zero_point) * (right - right_zero_point)).

    left: int8[..., M, K], of any strides: a transpose or an expand of it costs nothing.
    right: int8[..., K, N], likewise; transposed (its K axis contiguous) it is read fastest.
        Leading axes broadcast, and its last one may divide left's: grouped heads.
    scale: scale of left times scale of right times a factor (attention's 1 / sqrt(width)).
    left_zero_point, right_zero_point: the integers that stand for 0.0.
    label: the node and layout, for the profiler.

The result is [..., M, N], contiguous; a bias has N elements.
"""


def cost(left: Tensor, right: Tensor, out: Tensor) -> Cost:
    """Bytes and operations of one call; a multiplication and an addition are two operations."""
    return Cost(bytes=moved_bytes(left, right, out), operations=2 * out.numel() * left.shape[-1])


_LONGEST = longest_inner_axis(255, 255)
_PRODUCTS = one_of(ops.MATMUL, ops.BMM)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _find() -> tuple[Op, ...]:
    """The product, its right side as it lies, repeated for grouped heads, transposed, or both."""
    x, y, factor = Var("x"), Var("y"), Var("factor", where=_is_number)
    repeated = Op(
        ops.RESHAPE,
        Op(ops.EXPAND, Op(ops.UNSQUEEZE, y)),
        name="repeat",
        where=repeats_heads,
    )
    found = []
    for right in (y, repeated):
        turned = Op(ops.PERMUTE, right, name="turn", where=swaps_last_axes)
        for side in (right, turned):
            product = Op(_PRODUCTS, x, side, name="op")
            found += [product, Op(ops.MUL, product, factor), Op(ops.DIV, product, factor)]
    return tuple(found)


def shape_class(match: Match) -> str:
    """The class by the rows and columns of one matrix; "" if one is symbolic."""
    rows, columns = match.nodes["op"].meta["val"].shape[-2:]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return ""
    return product_class(rows, columns)


def build(site: Site) -> Node:
    """`int8_matmul` on the integers in front of the dequantizes, and of transposes and repeats."""
    match = site.match
    left, right = affine_of(match["x"]), affine_of(match["y"])
    assert left is not None  # the row's schemes say so
    assert right is not None
    matrix = site.integers("y")
    if "turn" in match.nodes:
        transpose = aten.transpose.int
        matrix = site.editor.call(transpose, matrix, -2, -1, like=match.anchor, before=site.place)
    return site.call(
        Int8Matmul,
        site.integers("x"),
        matrix,
        left.scale * right.scale * _factor(match),
        left.zero_point,
        right.zero_point,
        **output_arguments(site),
    )


def _factor(match: Match) -> float:
    factor = float(match.values.get("factor", 1.0))
    return 1.0 / factor if is_call(match.anchor, ops.DIV) else factor


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    left, right = (node.args[i].meta["val"] for i in (0, 1))  # type: ignore[union-attr]  # nodes by construction
    return cost(left, right, node.meta["val"])


def _sums_fit(match: Match) -> bool:
    # A symbolic size is held to the range that the program was exported with.
    depth = match.node("x").meta["val"].shape[-1]
    if isinstance(depth, int):
        return depth <= _LONGEST
    env = depth.node.shape_env
    bounds = env.bound_sympy(depth.node.expr)
    return bool(bounds.upper <= _LONGEST)


def _are_matrices(match: Match) -> bool:
    return all(match.node(name).meta["val"].dim() >= 2 for name in ("x", "y"))


def _divides_by_a_number(match: Match) -> bool:
    if not is_call(match.anchor, ops.DIV):
        return True
    return "rounding_mode" not in match.anchor.kwargs and argument(match.anchor, "other") != 0


_ROW = OpRow(
    name="matmul",
    find=_find(),
    slots=(
        Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
        Slot(at="y", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
    ),
    constraints=(
        Constraint(text="two matrices, or batches of them", holds=_are_matrices),
        Constraint(
            text=f"sums of at most {_LONGEST} products, also where a size is dynamic",
            holds=_sums_fit,
            fix="give the dynamic size a maximum: torch.export.Dim(name, max=…)",
        ),
        Constraint(text="a number other than 0 to divide by", holds=_divides_by_a_number),
    ),
    lowers_to="pt2e_quant::int8_matmul",
    note="a transpose or a repeat of heads in front of it, a factor behind it, cost nothing",
)

KERNELS = (
    Kernel(
        row=_ROW,
        device=Device.CUDA,
        op="int8_matmul",
        build=build,
        shape_class=shape_class,
        cost=node_cost,
    ),
)

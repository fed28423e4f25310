"""What int8_matmul stands for in a canonical graph, and how its call is built."""

from torch.fx import Node

from pt2e_quant.core.integer import longest_inner_axis
from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import Constraint, OpRow, Slot
from pt2e_quant.graph.ops import argument, aten, is_call
from pt2e_quant.graph.pattern import Match, Op, Var, one_of
from pt2e_quant.kernels.cost import Cost
from pt2e_quant.kernels.epilogue.read_graph import output_arguments
from pt2e_quant.kernels.int8_matmul.op import Int8Matmul, cost
from pt2e_quant.kernels.int8_matmul.product_class import product_class
from pt2e_quant.kernels.int8_matmul.read_matmul import repeats_heads, swaps_last_axes
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of
from pt2e_quant.kernels.site import Site

__all__ = ["KERNELS"]

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
    """By the rows and columns of one matrix; "" if one is symbolic."""
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
    """Of a fused call in a graph."""
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

"""The operator `pt2e_quant::softmax_quantize`, and where a graph calls it."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import FLOAT_OPERANDS
from pt2e_quant.graph.op_table import Constraint, OpRow
from pt2e_quant.graph.ops import arguments, is_call
from pt2e_quant.graph.pattern import Match, Op, Pattern, Var, either_order
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.read_graph import output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import QUANTIZED_RESULT
from pt2e_quant.kernels.shape_classes import by_columns
from pt2e_quant.kernels.site import Site
from pt2e_quant.kernels.softmax_quantize import reference
from pt2e_quant.kernels.softmax_quantize.reference import LONGEST


def _fake(x: Tensor, *rest: Any, out_dtype: torch.dtype = torch.int8, **named: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype)


SoftmaxQuantize = define(
    "softmax_quantize(Tensor x, Tensor? mask=None, float scale=1.0, ScalarType value_dtype=float, "
    "*, ScalarType out_dtype=int8, float out_scale=0.00390625, int out_zero_point=-128, "
    'int out_min=-128, int out_max=127, str label="") -> Tensor',
    reference=reference.softmax_quantize,
    triton=triton_kernel("pt2e_quant.kernels.softmax_quantize.gpu", "softmax_quantize"),
    fake=_fake,
)
"""q(softmax(x * scale + mask)) along the last axis.

    x: float32, float16 or bfloat16 of 1 to 4 axes; rows of at most 16384, each with a finite score.
    mask: a float dtype, broadcasts to x; None for none.
    scale: what scores are multiplied by.
    value_dtype: what the result is rounded to before it is quantized: the graph's own dtype.
    out_dtype, …, out_max: of `epilogue.Epilogue`.
    label: the node, for the profiler.
"""


def cost(x: Tensor, mask: Tensor | None) -> Cost:
    """Bytes of one call, and about ten operations an element."""
    return Cost(bytes=moved_bytes(x, mask) + x.numel(), operations=10 * x.numel())


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value != 0


def _scaled() -> tuple[Op, ...]:
    """The scores times or by a number."""
    x, factor = Var("x"), Var("factor", where=_is_number)
    return tuple(Op(overloads, x, factor, name="scale") for overloads in (ops.MUL, ops.DIV))


def _softmax(*scores: Pattern) -> tuple[Op, ...]:
    """Softmax of either, alone or cast to the dtype of the model."""
    found = tuple(Op(ops.SOFTMAX, each, Var("dim"), name="op") for each in scores)
    return (*found, *(Op(ops.CASTS, each) for each in found))


_FIND: dict[str, tuple[Op, ...]] = {
    "softmax": _softmax(Var("x")),
    "softmax_scaled": _softmax(*_scaled()),
    "softmax_masked": _softmax(Op(ops.ADD, Var("x"), Var("mask"), name="add")),
    "softmax_scaled_masked": _softmax(
        *(
            added
            for scaled in _scaled()
            for added in either_order(ops.ADD, scaled, Var("mask"), name="add")
        )
    ),
}


def _is_last_axis(match: Match) -> bool:
    x = match.node("x").meta["val"]
    return isinstance(match["dim"], int) and match["dim"] % max(1, x.dim()) == x.dim() - 1


def _fits_registers(match: Match) -> bool:
    shape = match.node("x").meta["val"].shape
    return 1 <= len(shape) <= 4 and isinstance(shape[-1], int) and 1 <= shape[-1] <= LONGEST


def _mask_broadcasts(match: Match) -> bool:
    """True if the mask adds no axis and no size to the scores; as expressions: no guards."""
    if "add" not in match.nodes:
        return True
    if arguments(match.nodes["add"]).get("alpha", 1) != 1:
        return False
    mask: Any = match["mask"].meta["val"].shape if isinstance(match["mask"], Node) else ()
    scores = match.node("x").meta["val"].shape
    pairs = zip(reversed(mask), reversed(scores), strict=False)
    return len(mask) <= len(scores) and all(str(a) in ("1", str(b)) for a, b in pairs)


_CONSTRAINTS = (
    FLOAT_OPERANDS,
    Constraint(text="the last axis", holds=_is_last_axis),
    Constraint(
        text=f"1 to 4 axes, rows of at most {LONGEST} scores, which a program holds in registers",
        holds=_fits_registers,
    ),
    Constraint(text="a mask that broadcasts to the scores", holds=_mask_broadcasts),
    QUANTIZED_RESULT,
)


def _factor(match: Match) -> float:
    if "scale" not in match.nodes:
        return 1.0
    number = float(match["factor"])
    return 1.0 / number if is_call(match.nodes["scale"], ops.DIV) else number


def build(site: Site) -> Node:
    """`softmax_quantize` to the qparams of the quantizes behind the softmax."""
    match, now = site.match, site.editor.now
    assert site.output is not None  # QUANTIZED_RESULT
    return site.call(
        SoftmaxQuantize,
        now(match.node("x")),
        now(match.node("mask")) if "add" in match.nodes else None,
        _factor(match),
        match.anchor.meta["val"].dtype,
        **output_arguments(site),
    )


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph."""
    x, mask = (a.meta["val"] if isinstance(a, Node) else None for a in node.args[:2])
    assert x is not None  # scores by schema
    return cost(x, mask)


KERNELS = tuple(
    Kernel(
        # No slots: what reads the softmax quantizes it, or nothing does.
        row=OpRow(
            name=name,
            find=patterns,
            slots=(),
            constraints=_CONSTRAINTS,
            lowers_to="pt2e_quant::softmax_quantize",
            note="float scores to integers",
        ),
        device=Device.CUDA,
        op="softmax_quantize",
        build=build,
        shape_class=by_columns,
        cost=node_cost,
    )
    for name, patterns in _FIND.items()
)

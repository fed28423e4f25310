"""Data movement on integers, by torch's own operators on any device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.op_table import OUT, Constraint, OpKind, OpRow, Slot
from pt2e_quant.graph.ops import Overloads
from pt2e_quant.graph.pattern import Many, Match, Op, Var, one_of
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.quantized_values import affine_of, requantized
from pt2e_quant.kernels.site import Site


def _sources(match: Match) -> tuple[Node, ...]:
    value = match["x"]
    return value if isinstance(value, tuple) else (value,)


def _has_one_scale(match: Match) -> bool:
    """True if all that goes in and out has the same qparams; true of a graph without q/dq."""
    written = requantized(match.anchor)
    if written is None:
        return not any(affine_of(source) for source in _sources(match))
    return {affine_of(source) for source in _sources(match)} == {written[0]}


ONE_SCALE = Constraint(text="the same qparams going in and out", holds=_has_one_scale)


def build(site: Site) -> Node:
    """Build the operator on the integers."""
    anchor = site.match.anchor
    integers = {source: site.editor.now(source.args[0]) for source in _sources(site.match)}  # type: ignore[arg-type]  # dequantizes
    swap: Callable[[Node], Any] = lambda node: integers.get(node, node)  # noqa: E731  # typed as map_arg wants it
    args: Any = torch.fx.node.map_arg(anchor.args, swap)
    kwargs: Any = torch.fx.node.map_arg(anchor.kwargs, swap)
    return site.call(anchor.target, *args, **kwargs)


def node_cost(node: Node) -> Cost:
    """A view moves nothing; what copies reads and writes each element once, which this counts."""
    values = [source.meta["val"] for source in node.all_input_nodes]
    tensors = [value for value in values if isinstance(value, Tensor)]  # sizes are inputs too
    return Cost(bytes=moved_bytes(node.meta["val"], *tensors), operations=0)


def _row(name: str, overloads: Overloads, x: Var | Many) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, x, name="op"),),
        slots=(
            Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
            Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,)),
        ),
        share=(("x", OUT),),
        constraints=(ONE_SCALE,),
        lowers_to="the same on int8",
        kind=OpKind.MOVES,
    )


_ROWS = (
    _row("reshape", one_of(ops.RESHAPE, ops.SQUEEZE, ops.UNSQUEEZE), Var("x")),
    _row("permute", ops.PERMUTE, Var("x")),
    _row("slice", one_of(ops.SLICE, ops.SELECT), Var("x")),
)

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="data_movement",
        build=build,
        shape_class=lambda match: "any",
        # Not a kernel of ours that could lose to float: a quarter of float32's bytes.
        measured={"any": 1.0},
        cost=node_cost,
    )
    for row in _ROWS
)

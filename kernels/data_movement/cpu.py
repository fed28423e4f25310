"""Data movement and max-pooling on the uint8 of oneDNN's operators."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from pt2e_quant.core.schemes import UINT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import NO_INDICES
from pt2e_quant.graph.op_table import OUT, Constraint, OpKind, OpRow, Slot
from pt2e_quant.graph.ops import Overloads, arguments, each_axis
from pt2e_quant.graph.pattern import Many, Match, Op, Var, one_of
from pt2e_quant.kernels.data_movement.entries import ONE_SCALE, build, node_cost
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.onednn.site import channels_last
from pt2e_quant.kernels.onednn.speed import SHAPE_CLASS_KEY, measured_here
from pt2e_quant.kernels.site import Site


def _moves(
    name: str, overloads: Overloads, lowers_to: str, *needs: Constraint, x: Var | Many | None = None
) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, x or Var("x"), name="op"),),
        slots=(
            Slot(at="x", role=Role.INPUT, accepts=(UINT8_ACTIVATION,)),
            Slot(at=OUT, role=Role.OUTPUT, accepts=(UINT8_ACTIVATION,)),
        ),
        share=(("x", OUT),),
        constraints=(ONE_SCALE, *needs),
        kind=OpKind.LIGHT,
        lowers_to=lowers_to,
    )


def build_max_pool(site: Site) -> Node:
    """Torch's integer max-pool; in channels-last order it is vectorized over channels."""
    found = arguments(site.match.nodes["op"])
    ordered = channels_last(site, site.integers("x"))
    sizes = [each_axis(found[name], 2) for name in ("kernel_size", "stride", "padding", "dilation")]
    sizes[1] = sizes[1] or sizes[0]
    target: Any = torch.ops.quantized.max_pool2d.default
    return site.call(target, ordered, *sizes, found["ceil_mode"])


_MOVES = (
    _moves("reshape", one_of(ops.RESHAPE, ops.SQUEEZE, ops.UNSQUEEZE), "the same on uint8"),
    _moves("permute", ops.PERMUTE, "the same on uint8"),
    _moves("slice", one_of(ops.SLICE, ops.SELECT), "the same on uint8"),
    _moves("cat", ops.CAT, "aten.cat on uint8", x=Many("x")),
)
_MAX_POOL = _moves("max_pool2d", ops.MAX_POOL2D, "quantized.max_pool2d", NO_INDICES)

_MEASURED: dict[str, Callable[[Site], Node]] = {"cat": build, _MAX_POOL.name: build_max_pool}
"""The measurements of `python -m benchmarks.cpu_elementwise`, by shape class."""


def _build(row: OpRow) -> Callable[[Site], Node]:
    if row.name not in _MEASURED:
        return build

    def marked(site: Site) -> Node:
        made = _MEASURED[row.name](site)
        made.meta[SHAPE_CLASS_KEY] = row.name
        return made

    return marked


def _class_of(row: OpRow) -> Callable[[Match], str]:
    name = row.name if row.name in _MEASURED else "any"
    return lambda match: name


KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CPU,
        op="data_movement",
        build=_build(row),
        shape_class=_class_of(row),
        # The others could not lose to float: views, or a quarter of float32's bytes.
        measured=measured_here("data_movement") if row.name in _MEASURED else {"any": 1.0},
        cost=node_cost,
    )
    for row in (*_MOVES, _MAX_POOL)
)

"""The operator `pt2e_quant::int8_pool`, and where a graph calls it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.schemes import INT8_ACTIVATION, Role
from pt2e_quant.graph import ops
from pt2e_quant.graph.conditions import BATCHED_2D, GLOBAL_MEAN, NO_INDICES
from pt2e_quant.graph.op_table import OUT, Constraint, OpRow, Slot
from pt2e_quant.graph.ops import Overloads, arguments, aten, each_axis, is_call
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.kernels.cost import Cost, moved_bytes
from pt2e_quant.kernels.epilogue.epilogue import OUTPUT_SCHEMA
from pt2e_quant.kernels.epilogue.read_graph import operand_of, output_arguments
from pt2e_quant.kernels.fused_op import define, triton_kernel
from pt2e_quant.kernels.int8_pool import reference
from pt2e_quant.kernels.int8_pool.windows import PoolKind, shape_class
from pt2e_quant.kernels.kernel import Device, Kernel
from pt2e_quant.kernels.site import Site


def _fake(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    out_size: Sequence[int],
    *rest: Any,
    out_dtype: torch.dtype = torch.float32,
    **named: Any,
) -> Tensor:
    return reference.like_images(x, out_size, out_dtype)


Int8Pool = define(
    "int8_pool(Tensor x, str kind, int[] kernel, int[] stride, int[] padding, int[] out_size, "
    "bool counts_padding=True, int divisor=0, *, float x_scale=1.0, int x_zero_point=0, "
    f'{OUTPUT_SCHEMA}, str label="") -> Tensor',
    reference=reference.int8_pool,
    triton=triton_kernel("pt2e_quant.kernels.int8_pool.gpu", "int8_pool"),
    fake=_fake,
)
"""y = q(activation(pool(dq(x)))) of images [N, C, H, W]; the result is channels-last.

    x: int8 or uint8 with the qparams x_scale and x_zero_point; channels-last without a copy.
    kind: of `windows.PoolKind`.
    kernel, stride, padding: (H, W) each; not read where kind is "adaptive". No dilation.
    out_size: (H, W) of the result, as torch computes it with or without ceil_mode.
    counts_padding, divisor: what an average divides by; divisor is 0 for the elements' number.
    out_dtype: int8 or uint8 with the qparams out_scale and so on, or a float dtype.
    label: the node, for the profiler.

Every window has an element: padding is at most half of the kernel.
"""


def cost(x: Tensor, out: Tensor, window: int) -> Cost:
    """Bytes of one call, and an operation for each element of each window."""
    return Cost(bytes=moved_bytes(x, out), operations=out.numel() * window)


@dataclass(frozen=True, slots=True)
class _Pool:
    """The arguments from kind to divisor."""

    kind: PoolKind
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    out_size: tuple[int, ...]
    counts_padding: bool = True
    divisor: int = 0


_NONE = (0, 0)


def _pool_of(match: Match) -> _Pool:
    call = match.nodes["op"]
    size = tuple(match.anchor.meta["val"].shape[2:])
    if is_call(call, ops.MEAN):
        return _Pool(PoolKind.ADAPTIVE, _NONE, _NONE, _NONE, (1, 1))
    if is_call(call, ops.ADAPTIVE_AVG_POOL2D):
        return _Pool(PoolKind.ADAPTIVE, _NONE, _NONE, _NONE, size)
    found = arguments(call)
    kernel = tuple(each_axis(found["kernel_size"], 2))
    stride = tuple(each_axis(found["stride"], 2)) if found["stride"] else kernel
    padding = tuple(each_axis(found["padding"], 2))
    if is_call(call, ops.MAX_POOL2D):
        return _Pool(PoolKind.MAX, kernel, stride, padding, size)
    counts, divisor = bool(found["count_include_pad"]), found["divisor_override"] or 0
    return _Pool(PoolKind.AVERAGE, kernel, stride, padding, size, counts, divisor)


def build(site: Site) -> Node:
    """`int8_pool` on the integers, and the axes of a mean dropped where it drops them."""
    pool, match = _pool_of(site.match), site.match
    x, scale, zero_point = operand_of(site, match.node("x"))
    positional = (
        str(pool.kind),
        list(pool.kernel),
        list(pool.stride),
        list(pool.padding),
        list(pool.out_size),
        pool.counts_padding,
        pool.divisor,
    )
    named = {"x_scale": scale, "x_zero_point": zero_point, **output_arguments(site)}
    if match.anchor.meta["val"].dim() == 4:
        return site.call(Int8Pool, x, *positional, **named)
    pooled = site.editor.call(
        Int8Pool, x, *positional, like=match.anchor, before=site.place, **named
    )
    return site.call(aten.squeeze.dims, pooled, [2, 3])


def _class(match: Match) -> str:
    return shape_class(_pool_of(match).out_size)


def node_cost(node: Node) -> Cost:
    """The cost of a fused call in a graph; a mean's is that of the pool behind its squeeze."""
    call: Any = node if node.target is Int8Pool else node.args[0]
    x, out = call.args[0].meta["val"], call.meta["val"]
    kernel = call.args[2]
    if call.args[1] == PoolKind.ADAPTIVE:
        kernel = [size // most for size, most in zip(x.shape[2:], out.shape[2:], strict=True)]
    return cost(x, out, kernel[0] * kernel[1])


def _has_no_dilation(match: Match) -> bool:
    return set(each_axis(arguments(match.nodes["op"]).get("dilation", 1), 2)) == {1}


def _is_static(match: Match) -> bool:
    x = match.node("x").meta["val"]
    return all(
        isinstance(size, int) for size in (*x.shape[2:], *match.anchor.meta["val"].shape[2:])
    )


NO_DILATION = Constraint(text="no dilation", holds=_has_no_dilation)
STATIC_SIZES = Constraint(text="sizes of images that are known", holds=_is_static)


def _row(name: str, overloads: Overloads, *needs: Constraint, shares: bool = False) -> OpRow:
    return OpRow(
        name=name,
        find=(Op(overloads, Var("x"), name="op"),),
        slots=(
            Slot(at="x", role=Role.INPUT, accepts=(INT8_ACTIVATION,)),
            Slot(at=OUT, role=Role.OUTPUT, accepts=(INT8_ACTIVATION,), is_optional=True),
        ),
        share=(("x", OUT),) if shares else (),
        constraints=(BATCHED_2D, *needs, STATIC_SIZES),
        lowers_to="pt2e_quant::int8_pool",
        note="the result may be float",
    )


_ROWS = (
    _row("max_pool2d", ops.MAX_POOL2D, NO_INDICES, NO_DILATION, shares=True),
    _row("avg_pool2d", ops.AVG_POOL2D),
    _row("adaptive_avg_pool2d", ops.ADAPTIVE_AVG_POOL2D),
    _row("mean", ops.MEAN, GLOBAL_MEAN),
)

KERNELS = tuple(
    Kernel(
        row=row,
        device=Device.CUDA,
        op="int8_pool",
        build=build,
        shape_class=_class,
        cost=node_cost,
    )
    for row in _ROWS
)

"""Depthwise convolutions with large kernels, as sums of those that XNNPACK has a kernel for."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.float_retries import fallback_of, is_left_plain
from pt2e_quant.backends.target.leave_slower import Slower
from pt2e_quant.backends.target.requantize_between import own_dequantize
from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    CONV1D,
    CONV2D,
    argument,
    aten,
    each_axis,
    each_padding,
    is_call,
    is_depthwise,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass

_MOST_TAPS = 25
"""Of XNNPACK's largest depthwise kernel: others are products of one channel each."""
_WORTH = 4
"""Taps for each convolution that the sum has, at least: such a product takes the time of one of
about as many (`benchmarks/delegated_functions.py`)."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a kernel at even distances, as many in front of its middle as behind it.

    A kernel of them pads alike on both sides, so that its results lie where those of the whole lie.
    """

    first: int
    count: int
    step: int


@graph_pass(needs=(HAS_VALUES,), gives=())
def split_large_kernels(gm: GraphModule) -> PassResult:
    """Write float depthwise convolutions of more than 25 taps as sums of smaller ones.

    Before:  conv2d(x, w[C, 1, 7, 7], b, padding=3, groups=C)
    After:   conv2d(x, w[:, :, 2:5], b, padding=[1, 3], groups=C)
             + conv2d(x, w[:, :, [1, 5]], padding=[2, 3], dilation=[4, 1], groups=C)
             + conv2d(x, w[:, :, [0, 6]], padding=[3, 3], dilation=[6, 1], groups=C)
    """
    editor = Editor(gm)
    notes = []
    for conv in [n for n in gm.graph.nodes if is_call(n, CONV1D + CONV2D)]:
        held: Any = argument(conv, "weight")
        weight = None if is_dequantize(held) else constant_of(gm, held)
        plan = _plan(conv) if weight is not None and not is_left_plain(conv) else None
        if weight is not None and plan is not None:
            editor.replace(conv, _written(editor, conv, weight, plan))
            notes.append(Note(conv.name, f"a kernel of {weight[0].numel()} taps is split"))
    return PassResult(editor.finish(), tuple(notes))


def large_kernels(gm: GraphModule) -> Iterator[Slower]:
    """Quantized convolutions that are sums of smaller ones in float: integers have no such form."""
    for conv in [n for n in gm.graph.nodes if is_call(n, CONV1D + CONV2D)]:
        if is_dequantize(argument(conv, "weight")) and not fallback_of(conv) and _plan(conv):
            text = f"XNNPACK has no depthwise kernel of more than {_MOST_TAPS} taps"
            yield Slower(conv, [], Note(conv.name, text))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """The parts of a kernel along one of its axes, and the numbers of the whole convolution."""

    axis: int
    parts: list[_Rows]
    padding: list[int]
    dilation: list[int]


def _plan(conv: Node) -> _Plan | None:
    """How a convolution is split; None if it is not depthwise, small, or not padded alike."""
    weight: Tensor = argument(conv, "weight").meta["val"]
    kernel, rank = list(weight.shape[2:]), weight.dim() - 2
    if not is_depthwise(conv) or weight[0].numel() <= _MOST_TAPS:
        return None
    splits = [(parts, axis) for axis in range(rank) if (parts := _split(kernel, axis))]
    dilation = each_axis(argument(conv, "dilation"), rank)
    pads = each_padding(argument(conv, "padding"), kernel, dilation)
    if not splits or any(before != behind for before, behind in pads):
        return None
    parts, axis = min(splits, key=lambda split: len(split[0]))
    padding = [before for before, _ in pads]
    if min(padding[axis] - part.first * dilation[axis] for part in parts) < 0:
        return None
    return _Plan(axis=axis, parts=parts, padding=padding, dilation=dilation)


def _written(editor: Editor, conv: Node, weight: Tensor, plan: _Plan) -> Node:
    x, bias, axis = conv.all_input_nodes[0], argument(conv, "bias"), plan.axis
    rank = weight.dim() - 2
    stride = each_axis(argument(conv, "stride"), rank)
    operator = aten.conv1d.default if rank == 1 else aten.conv2d.default
    made: list[Node] = []
    for part in plan.parts:
        stop = part.first + (part.count - 1) * part.step + 1
        rows = [slice(None)] * (2 + axis) + [slice(part.first, stop, part.step)]
        held = editor.constant(f"{conv.name}.rows", weight[tuple(rows)].clone(), like=conv)
        padding, dilation = list(plan.padding), list(plan.dilation)
        padding[axis] -= part.first * dilation[axis]
        dilation[axis] *= part.step
        args = (bias if not made else None, stride, padding, dilation, len(weight))
        made.append(editor.call(operator, own_dequantize(editor, x), held, *args, like=conv))
    editor.discard([x])
    total = made[0]
    for one in made[1:]:
        total = editor.call(aten.add.Tensor, total, one, like=conv)
    return total


def _split(kernel: list[int], axis: int) -> list[_Rows]:
    """The parts of a kernel along an axis; none where they would be too large or too many."""
    size = kernel[axis]
    each = math.prod(kernel) // size
    if size % 2 and (size + 1) // 2 * each <= _MOST_TAPS:
        return [_Rows(0, (size + 1) // 2, 2), _Rows(1, size // 2, 2)]
    if 2 * each > _MOST_TAPS:
        return []
    middle = min(size, _MOST_TAPS // each)
    middle -= (size - middle) % 2
    ends = (size - middle) // 2
    parts = [_Rows(ends, middle, 1)] if middle else []
    parts += [_Rows(at, 2, size - 1 - 2 * at) for at in range(ends)]
    return parts if _WORTH * len(parts) <= size * each else []

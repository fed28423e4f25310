"""Write transposed convolutions as convolutions whose channels are moved to places."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of, source_constant
from pt2e_quant.graph.ops import (
    CONV_TRANSPOSE1D,
    CONV_TRANSPOSE2D,
    arguments,
    aten,
    each_axis,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, GraphPass, Note, PassResult

_CONVS = {1: aten.conv1d.default, 2: aten.conv2d.default}


def shuffle_upsampling(reason_against: Callable[[GraphModule, Node], str]) -> GraphPass:
    """A pass that writes a transposed convolution of stride s with s x s times the channels.

    Every s-th output is a convolution of the input with every s-th tap of the kernel (Shi et al.
    2016, Is the deconvolution layer the same as a convolutional layer?, arXiv 1609.07009). The
    kernel of all of them together has zeros where an output of them has no tap.

    Before:  conv_transpose2d(x, w[Ci, Co, k, k], b, stride=s)
    After:   pixel_shuffle(conv2d(x, w[Co * s * s, Ci, n, n], b[Co * s * s]), s)

    Args:
        reason_against: why a runtime is to keep one as it is; empty where it is not.
    """

    def edit(gm: GraphModule) -> PassResult:
        editor = Editor(gm)
        notes = []
        for node in [n for n in gm.graph.nodes if is_call(n, CONV_TRANSPOSE1D + CONV_TRANSPOSE2D)]:
            reason = _reason_of_form(gm, node) or reason_against(gm, node)
            if reason:
                notes.append(Note(node.name, reason, skipped=True))
                continue
            editor.replace(node, _written_out(gm, editor, node))
            notes.append(Note(node.name, f"{node.target} -> convolution, data movement"))
        return PassResult(changed=editor.finish(), notes=tuple(notes))

    return GraphPass("shuffle_upsampling", edit, needs=(HAS_VALUES,), gives=())


def _reason_of_form(gm: GraphModule, node: Node) -> str:
    """Why a transposed convolution has no such form; empty where it has."""
    if not isinstance(node.args[1], Node) or constant_of(gm, node.args[1]) is None:
        return "its weight is computed"
    if any(min(axis.padded) < 0 for axis in _axes(node)):
        return "its padding cuts off more than its kernel adds"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One axis of a transposed convolution, as a convolution with a phase for each s-th output.

    Output s t + phase is the sum over the kernel's taps k with s | phase + padding - dilation k,
    of input t + (phase + padding - dilation k) / s.

    Args:
        stride: s.
        taps: of each phase, tap of the kernel by offset of the input.
        cut: how many results are left over at the end.
        grows: by how many places there are more inputs with their padding than outputs of a phase.
    """

    stride: int
    taps: tuple[dict[int, int], ...]
    cut: int
    grows: int

    @property
    def offsets(self) -> range:
        """All offsets that a phase reads, and those between them."""
        found = [offset for phase in self.taps for offset in phase]
        return range(min(found), max(found) + 1)

    @property
    def padded(self) -> tuple[int, int]:
        """Zeros before and behind the input."""
        before = -self.offsets[0]
        return before, self.grows - before + len(self.offsets) - 1


def _axes(node: Node) -> list[_Axis]:
    found = arguments(node)
    kernel = node.args[1].meta["val"].shape[2:]  # type: ignore[union-attr]
    rank = len(kernel)
    given = ("stride", "padding", "output_padding", "dilation")
    settings = zip(*(each_axis(found[name], rank) for name in given), strict=True)
    return [_axis(size, *one) for size, one in zip(kernel, settings, strict=True)]


def _axis(kernel: int, stride: int, padding: int, more: int, dilation: int) -> _Axis:
    taps = tuple(
        {
            (phase + padding - dilation * tap) // stride: tap
            for tap in range(kernel)
            if (phase + padding - dilation * tap) % stride == 0
        }
        for phase in range(stride)
    )
    # Of L inputs there are s L + beyond outputs.
    beyond = dilation * (kernel - 1) + more + 1 - 2 * padding - stride
    return _Axis(
        stride=stride, taps=taps, cut=-beyond % stride, grows=(beyond + -beyond % stride) // stride
    )


def _written_out(gm: GraphModule, editor: Editor, node: Node) -> Node:
    x, stored = node.args[0], node.args[1]
    assert isinstance(x, Node)
    assert isinstance(stored, Node)
    weight = constant_of(gm, stored)
    assert weight is not None
    axes = _axes(node)
    phases = math.prod(axis.stride for axis in axes)
    groups = arguments(node)["groups"]
    flat = _phase_weights(weight, axes, groups)
    constants = [editor.constant(f"{_name(stored)}_shuffled", flat, like=stored)]
    bias_node = arguments(node)["bias"]
    bias = constant_of(gm, bias_node) if isinstance(bias_node, Node) else None
    if bias is not None:
        each = bias.repeat_interleave(phases)
        constants.append(editor.constant(f"{_name(bias_node)}_shuffled", each, like=bias_node))
    else:
        constants.append(bias_node)
    x, padding = _padded(editor, node, x, axes)
    ones = [1] * len(axes)
    conv = _CONVS[len(axes)]
    made = editor.call(conv, x, *constants, ones, padding, ones, groups, like=node, before=node)
    return _moved_to_places(editor, node, made, axes)


def _phase_weights(weight: Tensor, axes: Sequence[_Axis], groups: int) -> Tensor:
    """The weights of all phases, (channels * phases, inputs of a group, offsets …)."""
    channels = weight.shape[1] * groups
    # (inputs, results of a group, …) to (results, inputs of a group, …)
    by_group = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    phases = list(product(*(range(axis.stride) for axis in axes)))
    made = weight.new_zeros(
        channels, len(phases), by_group.shape[1], *(len(a.offsets) for a in axes)
    )
    every: Any = slice(None)
    for number, phase in enumerate(phases):
        taps = [axis.taps[at] for axis, at in zip(axes, phase, strict=True)]
        for places in product(*taps):
            at = [place - axis.offsets[0] for place, axis in zip(places, axes, strict=True)]
            tap = [found[place] for found, place in zip(taps, places, strict=True)]
            made[(every, number, every, *at)] = by_group[(every, every, *tap)]
    return made.flatten(0, 1).contiguous()


def _padded(editor: Editor, node: Node, x: Node, axes: Sequence[_Axis]) -> tuple[Node, list[int]]:
    """The input with the padding that a convolution cannot add, and the padding that it adds."""
    both = [min(axis.padded) for axis in axes]
    rest = [n - least for axis, least in zip(axes, both, strict=True) for n in axis.padded]
    if any(rest):
        pairs = [rest[at : at + 2] for at in range(0, len(rest), 2)]
        sizes = [n for pair in reversed(pairs) for n in pair]
        x = editor.call(aten.constant_pad_nd.default, x, sizes, 0.0, like=node, before=node)
    return x, both


def _moved_to_places(editor: Editor, node: Node, made: Node, axes: Sequence[_Axis]) -> Node:
    """The phases, which are channels, as places of the axes that they belong to."""
    strides = [axis.stride for axis in axes]
    if max(strides) > 1:
        if len(axes) == 2 and strides[0] == strides[1]:
            made = editor.call(aten.pixel_shuffle.default, made, strides[0], like=node, before=node)
        else:
            made = _with_phases_inside(editor, node, made, strides)
    for dim, axis in enumerate(axes):
        if axis.cut:
            cut = (made, dim + 2, 0, -axis.cut)
            made = editor.call(aten.slice.Tensor, *cut, like=node, before=node)
    return made


def _with_phases_inside(editor: Editor, node: Node, made: Node, strides: Sequence[int]) -> Node:
    """As pixel_shuffle, with a factor for each axis: (N, C s t, H, W) to (N, C, H s, W t)."""
    rank = len(strides)
    sizes = [-1, *strides]
    made = editor.call(aten.unflatten.int, made, 1, sizes, like=node, before=node)
    order = [0, 1]
    for axis in range(rank):
        order += [2 + rank + axis, 2 + axis]
    made = editor.call(aten.permute.default, made, order, like=node, before=node)
    for axis in range(rank):
        ends = (2 + axis, 3 + axis)
        made = editor.call(aten.flatten.using_ints, made, *ends, like=node, before=node)
    return made


def _name(node: Node) -> str:
    source = source_constant(node)
    return node.name if source is None else str(source.target)

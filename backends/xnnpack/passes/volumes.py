"""Convolutions of volumes, which neither XNNPACK nor ExecuTorch has, as convolutions of images."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV3D, argument, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["conv3d_as_conv2d"]


@graph_pass()
def conv3d_as_conv2d(gm: GraphModule) -> PassResult:
    """Write a conv3d as one conv2d whose channels are the images under each step of the depth.

    Before:  conv3d(x, w, b)                                x: [N, C, D, H, W], w: [O, C, K, 3, 3]
    After:   conv2d(images(x), w.reshape(O, C * K, 3, 3), b)   images(x): [N * D', C * K, H, W]

    The K images of a channel stand side by side, so groups of channels stay what they are, and
    the weight is the same memory. In the quantized graph it is an int8 conv2d like any other.
    A volume without a batch gets one. One with dynamic sizes is left: its fake values come out with
    the example's sizes here.
    """
    editor = Editor(gm)
    notes = []
    for conv in [n for n in gm.graph.nodes if is_call(n, CONV3D)]:
        weight, x = argument(conv, "weight"), argument(conv, "input")
        held = constant_of(gm, weight)
        shape = x.meta["val"].shape
        if held is None or not all(isinstance(size, int) for size in shape):
            continue
        flat = editor.constant(f"{weight.target}_2d", held.detach().flatten(1, 2), like=weight)
        editor.replace(conv, _convolve(editor, conv, held, flat))
        notes.append(Note(conv.name, "conv3d -> conv2d"))
    return PassResult(editor.finish(), tuple(notes))


def _convolve(editor: Editor, conv: Node, held: Tensor, flat: Node) -> Node:
    x: Node = argument(conv, "input")
    stride, dilation = _three(conv, "stride"), _three(conv, "dilation")
    pads = _pads(conv, held, dilation)
    sides = [0, *(low if low == high else 0 for low, high in pads[1:])]  # the conv2d's own

    def call(target: Any, *args: Any) -> Node:
        return editor.call(target, *args, like=conv, before=conv)

    is_batch = conv.meta["val"].dim() == 5
    if not is_batch:
        x = call(aten.unsqueeze.default, x, 0)
    rest = [p - side for side, pad in zip(sides[::-1], pads[::-1], strict=True) for p in pad]
    if any(rest):
        x = call(aten.constant_pad_nd.default, x, rest)
    count, depth = held.shape[2], conv.meta["val"].shape[-3]
    images = []
    for at in range(count):
        start = at * dilation[0]
        end = start + (depth - 1) * stride[0] + 1
        images.append(call(aten.slice.Tensor, x, 2, start, end, stride[0]))
    stacked = call(aten.stack.default, images, 2)  # [N, C, K, D', H, W]
    rows = call(aten.permute.default, call(aten.flatten.using_ints, stacked, 1, 2), [0, 2, 1, 3, 4])
    made = call(
        aten.conv2d.default,
        call(aten.flatten.using_ints, rows, 0, 1),
        flat,
        argument(conv, "bias"),
        stride[1:],
        sides[1:],
        dilation[1:],
        argument(conv, "groups"),
    )
    apart = call(aten.unflatten.int, made, 0, [-1, depth])
    batch = call(aten.permute.default, apart, [0, 2, 1, 3, 4])
    return batch if is_batch else call(aten.squeeze.dim, batch, 0)


def _pads(conv: Node, held: Tensor, dilation: list[int]) -> list[tuple[int, int]]:
    """What is added in front and behind of each axis: "same" adds more behind."""
    padding: Any = argument(conv, "padding")
    if not isinstance(padding, str):
        return [(side, side) for side in _three(conv, "padding")]
    if padding == "valid":
        return [(0, 0)] * 3
    totals = [d * (size - 1) for d, size in zip(dilation, held.shape[2:], strict=True)]
    return [(total // 2, total - total // 2) for total in totals]


def _three(conv: Node, name: str) -> list[int]:
    value: Any = argument(conv, name)
    values = [value] if isinstance(value, int) else list(value)
    return values * 3 if len(values) == 1 else values

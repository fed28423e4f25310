"""Convolutions of volumes, which neither XNNPACK nor ExecuTorch has, as convolutions of images."""

from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import argument, aten, is_call
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["conv3d_as_conv2d"]


@graph_pass()
def conv3d_as_conv2d(gm: GraphModule) -> PassResult:
    """Write a conv3d as one conv2d whose channels are the images under each step of the depth.

    Before:  conv3d(x, w, b)                                x: [N, C, D, H, W], w: [O, C, K, 3, 3]
    After:   conv2d(images(x), w.reshape(O, C * K, 3, 3), b)   images(x): [N * D', C * K, H, W]

    The K images of a channel stand side by side, so groups of channels stay what they are, and
    the weight is the same memory. In the quantized graph it is an int8 conv2d like any other.
    A volume with dynamic sizes is left: its fake values come out with the example's sizes here.
    """
    editor = Editor(gm)
    notes = []
    for conv in [n for n in gm.graph.nodes if is_call(n, (aten.conv3d.default,))]:
        weight, x = argument(conv, "weight"), argument(conv, "input")
        held = constant_of(gm, weight)
        shape = x.meta["val"].shape
        if held is None or len(shape) != 5 or not all(isinstance(size, int) for size in shape):
            continue
        flat = editor.constant(f"{weight.target}_2d", held.detach().flatten(1, 2), like=weight)
        editor.replace(conv, _convolve(editor, conv, held, flat))
        notes.append(Note(conv.name, "conv3d -> conv2d"))
    return PassResult(editor.finish(), tuple(notes))


def _convolve(editor: Editor, conv: Node, held: Tensor, flat: Node) -> Node:
    x: Node = argument(conv, "input")
    stride, padding, dilation = (_three(conv, n) for n in ("stride", "padding", "dilation"))

    def call(target: Any, *args: Any) -> Node:
        return editor.call(target, *args, like=conv, before=conv)

    if padding[0]:
        x = call(aten.constant_pad_nd.default, x, [0, 0, 0, 0, padding[0], padding[0]])
    count, depth = held.shape[2], conv.meta["val"].shape[2]
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
        padding[1:],
        dilation[1:],
        argument(conv, "groups"),
    )
    apart = call(aten.unflatten.int, made, 0, [-1, depth])
    return call(aten.permute.default, apart, [0, 2, 1, 3, 4])


def _three(conv: Node, name: str) -> list[int]:
    value: Any = argument(conv, name)
    values = [value] if isinstance(value, int) else list(value)
    return values * 3 if len(values) == 1 else values

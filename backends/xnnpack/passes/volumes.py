"""Operators of volumes as those of images: neither XNNPACK nor ExecuTorch has their own.

In the float graph that this backend's quantizers annotate, and in the q/dq graph that another
package's quantizer made.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.backends.target.requantize_between import sole_quantize
from pt2e_quant.backends.xnnpack.passes.kernel_forms import is_static_int8
from pt2e_quant.core.qdq import DequantizePerTensor, QdqKind, is_dequantize, kind_of_qdq
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    HARDTANH,
    RELU,
    argument,
    aten,
    each_axis,
    each_padding,
    is_call,
)
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.passes.functions.rows import adaptive_max_pool, conv_transpose
from pt2e_quant.passes.functions.write_functions import trace_before, write_out


@graph_pass(needs=(), gives=())
def volumes_as_images(gm: GraphModule) -> PassResult:
    """Write convolutions and pools of volumes as those of images.

    A conv3d is one conv2d whose channels are the images under each step of the depth. The K images
    of a channel stand side by side, so groups of channels stay what they are, and the weight is
    the same memory. In the quantized graph it is an int8 conv2d like any other. A pool is one of
    the images and one of the depth. A transposed convolution that may give nothing, or whose
    result is padded by a stride or more, is cropped and padded behind: XNNPACK (in ExecuTorch 1.4)
    divides by the first one's size, which ends the process, and stops at the second.

    Before:  conv3d(x, w, b)                                x: [N, C, D, H, W], w: [O, C, K, 3, 3]
    After:   conv2d(images(x), w.reshape(O, C * K, 3, 3), b)   images(x): [N * D', C * K, H, W]
    """
    calls = [n for n in gm.graph.nodes if str(n.target) in _WRITTEN]
    written = [n for n in calls if write_out(gm, n, _WRITTEN[str(n.target)], is_canonical=True)]
    if written:
        gm.graph.eliminate_dead_code()
        recompile(gm)
    notes = (Note(n.name, f"{n.target} is written with operators of images") for n in written)
    return PassResult(bool(written), tuple(notes))


def _conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] | str = (0,),
    dilation: Sequence[int] = (1,),
    groups: int = 1,
) -> Tensor:
    if x.dim() == 4:
        made = _conv3d(x.unsqueeze(0), weight, bias, stride, padding, dilation, groups)
        return made.squeeze(0)
    taps, strides, dilations = weight.shape[2], each_axis(stride, 3), each_axis(dilation, 3)
    if isinstance(padding, str):
        sides = each_padding(padding, weight.shape[2:], dilations)
        x = F.pad(x, [side for pair in reversed(sides) for side in pair])
        padding = (0,)
    pads = each_axis(padding, 3)
    rows = images_under_steps(x, taps, strides[0], pads[0], dilations[0])
    made = F.conv2d(rows, weight.flatten(1, 2), bias, strides[1:], pads[1:], dilations[1:], groups)
    return volumes_of(made, x.shape[0])


def images_under_steps(
    x: Tensor, taps: int, stride: int, padding: int, dilation: int, value: int = 0
) -> Tensor:
    """The images under each step of a convolution along the depth, side by side as channels.

    Args:
        x: [N, C, D, H, W].
        taps: K, of the depth, as what follows.
        stride: of the steps.
        padding: on both sides.
        dilation: of the taps.
        value: that padding has.

    Returns:
        [N * D', C * K, H, W]
    """
    if padding:
        x = F.pad(x, (0, 0, 0, 0, padding, padding), value=value)
    depth = (x.shape[2] - dilation * (taps - 1) - 1) // stride + 1
    starts = [at * dilation for at in range(taps)]
    images = [x[:, :, s : s + (depth - 1) * stride + 1 : stride] for s in starts]
    return torch.stack(images, 2).flatten(1, 2).transpose(1, 2).flatten(0, 1)


def volumes_of(images: Tensor, batch: int) -> Tensor:
    """The volumes of a batch, [N, C, D, H, W], whose images stand in a row, [N * D, C, H, W]."""
    return torch.unflatten(images, 0, (batch, -1)).transpose(1, 2)


def _conv_transpose3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
) -> Tensor:
    """Each image gives as many as there are taps, which are added where they belong."""
    rest = (stride, padding, output_padding, groups, dilation)
    if x.dim() == 4:
        return _conv_transpose3d(x.unsqueeze(0), weight, bias, *rest).squeeze(0)
    given = stride, padding, output_padding, dilation
    strides, pads, ends, steps = (each_axis(value, 3) for value in given)
    taps, batch, depth = weight.shape[2], x.shape[0], x.shape[2]
    rows = x.transpose(1, 2).flatten(0, 1)
    flat = weight.flatten(1, 2)
    made = F.conv_transpose2d(rows, flat, None, strides[1:], pads[1:], ends[1:], groups, steps[1:])
    sizes = made.shape[2:]
    parts = torch.unflatten(made.flatten(2), 0, (batch, depth))
    parts = torch.unflatten(parts, 2, (-1, taps)).movedim(1, 3)  # [N, O, K, D, H' * W']
    if strides[0] > 1:
        parts = F.pad(parts.unsqueeze(4), (0, 0, 0, strides[0] - 1)).flatten(3, 4)
    reach = steps[0] * (taps - 1)
    places = [(at * steps[0], reach - at * steps[0] + ends[0]) for at in range(taps)]
    shifted = [F.pad(parts[:, :, at], (0, 0, *ends)) for at, ends in enumerate(places)]
    total = torch.stack(shifted).sum(0) if taps > 1 else shifted[0]
    count = (depth - 1) * strides[0] - 2 * pads[0] + reach + ends[0] + 1
    found = torch.unflatten(total[:, :, pads[0] : pads[0] + count], 3, sizes)
    return found if bias is None else found + bias.view(-1, 1, 1, 1)


def _pooled(
    x: Tensor,
    pool: Callable[..., Tensor],
    arguments: Sequence[Sequence[int]],
    identity: Sequence[int],
) -> Tensor:
    """A pool of the images, then of the depth, with arguments of three dimensions.

    Args:
        x: [..., D, H, W].
        pool: of images; called with an argument of two dimensions for each of three.
        arguments: of the volume.
        identity: each one's value for a dimension that is not pooled.
    """
    lead = x.shape[:-3]
    rows = x.flatten(0, -4) if x.dim() > 4 else x
    rows = pool(rows, *(argument[1:] for argument in arguments))
    sizes = rows.shape[-2:]
    pairs = [(a[0], one) for a, one in zip(arguments, identity, strict=True)]
    rows = pool(rows.flatten(-2).unsqueeze(1), *pairs).squeeze(1)
    return torch.unflatten(torch.unflatten(rows, -1, sizes), 0, lead)


def _max_pool3d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Tensor:
    def pool(rows: Tensor, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
        return F.max_pool2d(rows, size, stride, padding, dilation, ceil_mode)

    windows = [each_axis(v, 3) for v in (kernel_size, stride or kernel_size, padding, dilation)]
    return _pooled(x, pool, windows, (1, 1, 0, 1))


def _max_pool3d_with_indices(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """Places of the images are read where the pool of the depth found its own."""
    found = []

    def pool(rows: Tensor, size: Any, stride: Any, padding: Any, dilation: Any) -> Tensor:
        pair = F.max_pool2d_with_indices(rows, size, stride, padding, dilation, ceil_mode)
        found.append(pair[1])
        return pair[0]

    windows = [each_axis(v, 3) for v in (kernel_size, stride or kernel_size, padding, dilation)]
    made = _pooled(x, pool, windows, (1, 1, 0, 1))
    in_image, in_depth = found[0].flatten(1), found[1].flatten(1)  # of D images, of pooled rows
    in_image = in_image.reshape(in_depth.shape[0], -1)
    place = in_image.gather(1, in_depth)
    depth = torch.div(in_depth, made.shape[-2] * made.shape[-1], rounding_mode="floor")
    return made, (place + depth * (x.shape[-2] * x.shape[-1])).reshape(made.shape)


def _avg_pool3d(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """A mean of means: a window counts as many elements as its sides do, multiplied."""
    divisor = None if divisor_override is None else 1

    def pool(rows: Tensor, size: Any, stride: Any, padding: Any) -> Tensor:
        return F.avg_pool2d(rows, size, stride, padding, ceil_mode, count_include_pad, divisor)

    windows = [each_axis(v, 3) for v in (kernel_size, stride or kernel_size, padding)]
    made = _pooled(x, pool, windows, (1, 1, 0))
    return made if divisor_override is None else made / divisor_override


def _adaptive_avg_pool3d(x: Tensor, output_size: Any) -> Tensor:
    lead = x.shape[:-3]
    rows = F.adaptive_avg_pool2d(x.flatten(0, -4) if x.dim() > 4 else x, output_size[1:])
    sizes = rows.shape[-2:]
    rows = F.adaptive_avg_pool2d(rows.flatten(-2), (output_size[0], sizes.numel()))
    return torch.unflatten(torch.unflatten(rows, -1, sizes), 0, lead)


_WRITTEN: Mapping[str, Callable[..., Any]] = {
    "aten.adaptive_avg_pool3d.default": _adaptive_avg_pool3d,
    "aten.adaptive_max_pool3d.default": adaptive_max_pool,
    "aten.avg_pool3d.default": _avg_pool3d,
    "aten.conv3d.default": _conv3d,
    "aten.conv3d.padding": _conv3d,
    "aten.conv_transpose1d.default": conv_transpose,
    "aten.conv_transpose2d.input": conv_transpose,
    "aten.conv_transpose3d.input": _conv_transpose3d,
    "aten.max_pool3d.default": _max_pool3d,
    "aten.max_pool3d_with_indices.default": _max_pool3d_with_indices,
}


_WEIGHTS = (QdqKind.PER_TENSOR, QdqKind.PER_CHANNEL)


@graph_pass(needs=(HAS_VALUES,), gives=())
def volumes_in_integers(gm: GraphModule) -> PassResult:
    """Write quantized convolutions of volumes as quantized ones of images.

    This backend's own quantizers see the operators of images, and quantize those.

    Before:  q(relu(conv3d(dq(x_q), dq(w_q), b)))
    After:   volumes(q(relu(conv2d(dq(images(x_q)), dq(w_q.flatten(1, 2)), b))))
    """
    editor = Editor(gm)
    notes = []
    for conv in [n for n in gm.graph.nodes if n.target is aten.conv3d.default]:
        x, weight = argument(conv, "input"), argument(conv, "weight")
        clip = _clip_behind(conv)
        last = clip or conv
        quantize = sole_quantize(last)
        if quantize is None or not _is_quantized(gm, x, weight) or not is_static_int8(quantize):
            continue
        made = _conv2d(gm, editor, conv)
        if clip is not None:
            made = editor.call(clip.target, made, *clip.args[1:], like=clip, before=quantize)
        integers = editor.call(
            quantize.target, made, *quantize.args[1:], like=quantize, before=quantize
        )
        volumes = _written(gm, quantize, _as_volumes, integers, x.args[0])
        editor.replace(quantize, volumes)
        editor.discard([quantize, last, conv, x, weight])
        notes.append(Note(conv.name, "conv3d -> conv2d"))
    return PassResult(editor.finish(), tuple(notes))


def _clip_behind(conv: Node) -> Node | None:
    reader = next(iter(conv.users)) if len(conv.users) == 1 else None
    return reader if reader is not None and is_call(reader, (*RELU, *HARDTANH)) else None


def _is_quantized(gm: GraphModule, x: Node, weight: Node) -> bool:
    """True if a convolution of a batch has integers that XNNPACK multiplies, a row a channel."""
    if x.target is not DequantizePerTensor or not is_static_int8(x) or not is_dequantize(weight):
        return False
    if kind_of_qdq(weight) not in _WEIGHTS or len(x.meta["val"].shape) != 5:
        return False
    if kind_of_qdq(weight) is QdqKind.PER_CHANNEL and weight.args[3] != 0:
        return False
    held = weight.args[0]
    return isinstance(held, Node) and held.op == "get_attr" and constant_of(gm, held) is not None


def _conv2d(gm: GraphModule, editor: Editor, conv: Node) -> Node:
    """The convolution of the images that a conv3d reads, with the same integers as a weight."""
    x, weight = argument(conv, "input"), argument(conv, "weight")
    held: Any = weight.args[0]
    value = constant_of(gm, held)
    assert value is not None
    names = ("stride", "padding", "dilation")
    strides, pads, steps = (each_axis(argument(conv, name), 3) for name in names)

    def images(integers: Tensor) -> Tensor:
        taps, zero_point = value.shape[2], x.args[2]
        return images_under_steps(integers, taps, strides[0], pads[0], steps[0], zero_point)

    rows = _written(gm, conv, images, x.args[0])
    rows = editor.call(DequantizePerTensor, rows, *x.args[1:], like=conv, before=conv)
    flat = editor.constant(f"{held.target}_images", value.detach().flatten(1, 2), like=held)
    flat = editor.call(weight.target, flat, *weight.args[1:], like=weight, before=conv)
    bias, groups = argument(conv, "bias"), argument(conv, "groups")
    args = (rows, flat, bias, strides[1:], pads[1:], steps[1:], groups)
    return editor.call(aten.conv2d.default, *args, like=conv, before=conv)


def _as_volumes(images: Tensor, x: Tensor) -> Tensor:
    return volumes_of(images, x.shape[0])


def _written(gm: GraphModule, node: Node, call: Callable[..., Any], *inputs: Node) -> Node:
    """Trace a function of integers into the graph, in front of a node; returns its result."""
    made: Node = trace_before(gm, node, call, inputs, is_canonical=True)
    return made

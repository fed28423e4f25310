"""Operators of sequences and volumes, and average pools, as convolutions of images.

The delegate has no conv1d. ExecuTorch writes one as a conv2d between two reshapes inside of it,
and fails on them where both the batch and the length are dynamic: a reshape there takes one.
Neither XNNPACK nor ExecuTorch has operators of volumes, nor the delegate average pools in integers.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.backends.xnnpack.passes.requantize_between import sole_quantize
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor, is_dequantize
from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    AVG_POOL2D,
    CONV1D,
    CONV_TRANSPOSE1D,
    HARDTANH,
    RELU,
    argument,
    aten,
    each_axis,
    each_padding,
    is_call,
)
from pt2e_quant.graph.pattern import Match, Op, Var
from pt2e_quant.graph.pipeline import HAS_VALUES, Note, PassResult, graph_pass
from pt2e_quant.graph.rewrite import Rule, Skip, rewrite
from pt2e_quant.passes.functions.rows import adaptive_max_pool, conv_transpose
from pt2e_quant.passes.functions.write_functions import write_out


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
    if pads[0]:
        x = F.pad(x, (0, 0, 0, 0, pads[0], pads[0]))
    depth = (x.shape[2] - dilations[0] * (taps - 1) - 1) // strides[0] + 1
    starts = [at * dilations[0] for at in range(taps)]
    images = [x[:, :, s : s + (depth - 1) * strides[0] + 1 : strides[0]] for s in starts]
    rows = torch.stack(images, 2).flatten(1, 2).transpose(1, 2).flatten(0, 1)
    made = F.conv2d(rows, weight.flatten(1, 2), bias, strides[1:], pads[1:], dilations[1:], groups)
    return torch.unflatten(made, 0, (x.shape[0], depth)).transpose(1, 2)


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


_CONVS = (*CONV1D, *CONV_TRANSPOSE1D)


@graph_pass(needs=(HAS_VALUES,), gives=())
def conv1d_as_conv2d(gm: GraphModule) -> PassResult:
    """Write a conv1d of two dynamic sizes as a conv2d with a last size of 1; transposed ones too.

    Also those that share a weight: ExecuTorch (1.4) gives it a last size once for each of them.

    Before:  q(conv1d(dq(x_q), dq(w_q), b))
    After:   q(flatten(dq(q(conv2d(dq(q(unflatten(dq(x_q), -1, [-1, 1]))), dq(w_q_2d), b))), -2))

    `move_integers` then takes both reshapes on the integers, outside of the delegate, where
    ExecuTorch makes them views. Between two such convolutions none is left.
    """
    editor = Editor(gm)
    notes = []
    images: dict[Node, Node] = {}
    widened: dict[Node, Node] = {}
    convs = [n for n in gm.graph.nodes if is_call(n, _CONVS)]
    readers = Counter(_held(conv) for conv in convs)
    for conv in convs:
        weight, held = argument(conv, "weight"), _held(conv)
        value = constant_of(gm, held)
        if value is None or not (readers[held] > 1 or _has_two_dynamic_sizes(conv)):
            continue
        if len(conv.meta["val"].shape) != 3:
            continue
        if held not in widened:
            plane = value.detach().unsqueeze(-1)
            widened[held] = editor.constant(f"{held.target}_2d", plane, like=held)
        wide = widened[held]
        if held is not weight:
            wide = editor.call(weight.target, wide, *weight.args[1:], like=weight, before=conv)
        _widen(editor, conv, wide, images)
        notes.append(Note(conv.name, "conv1d -> conv2d"))
    return PassResult(editor.finish(), tuple(notes))


def _held(conv: Node) -> Node:
    """The constant behind a convolution's weight."""
    weight: Any = argument(conv, "weight")
    held: Node = weight.args[0] if is_dequantize(weight) else weight
    return held


def _has_two_dynamic_sizes(conv: Node) -> bool:
    return sum(not isinstance(size, int) for size in conv.meta["val"].shape) > 1


def _widen(editor: Editor, conv: Node, weight: Node, images: dict[Node, Node]) -> None:
    """Put a conv2d with reshapes around it in the place of a conv1d, with the clip behind it.

    Args:
        editor: inserts the calls.
        conv: the conv1d.
        weight: of the conv2d.
        images: what the conv2ds made so far give, by what takes the place of the conv1ds.
    """
    x = argument(conv, "input")
    image = _image(editor, x, conv, images)
    made = _conv2d(editor, conv, image, weight)
    last = conv
    clip = _sole_reader(conv)
    if clip is not None and is_call(clip, (*RELU, *HARDTANH)):
        made = editor.call(clip.target, made, *clip.args[1:], like=clip, before=clip)
        last = clip
    quantize = _sole_reader(last)
    if quantize is not None and quantize.target is QuantizePerTensor:
        made = _again(editor, made, quantize.args[1:], last)
    flat = editor.call(aten.flatten.using_ints, made, -2, -1, like=last, before=last)
    editor.replace(last, flat)
    images[flat] = made
    editor.discard([last, conv, x])


def _sole_reader(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _conv2d(editor: Editor, conv: Node, image: Node, weight: Node) -> Node:
    """The conv2d of a conv1d's arguments, each with that of a last size of 1."""
    bias, groups = argument(conv, "bias"), argument(conv, "groups")
    stride, dilation = (_pair(argument(conv, name), 1) for name in ("stride", "dilation"))
    padding = argument(conv, "padding")
    args: tuple[Any, ...] = (image, weight, bias, stride)
    if is_call(conv, CONV_TRANSPOSE1D):
        more = _pair(argument(conv, "output_padding"), 0)
        args = (*args, _pair(padding, 0), more, groups, dilation)
        return editor.call(aten.conv_transpose2d.input, *args, like=conv, before=conv)
    if isinstance(padding, str):
        args = (*args, padding, dilation, groups)
        return editor.call(aten.conv2d.padding, *args, like=conv, before=conv)
    args = (*args, _pair(padding, 0), dilation, groups)
    return editor.call(aten.conv2d.default, *args, like=conv, before=conv)


def _image(editor: Editor, x: Node, conv: Node, images: dict[Node, Node]) -> Node:
    """The input of a conv1d with a last size of 1, as the conv2d before it gives it if one does."""
    if x.target is not DequantizePerTensor:
        return images.get(x) or _open(editor, x, conv)
    quantize = x.args[0]
    assert isinstance(quantize, Node)
    made = images.get(quantize.args[0]) if quantize.target is QuantizePerTensor else None  # type: ignore[arg-type]  # a quantize reads a node
    if made is None or made.args[1:] != x.args[1:]:
        return _again(editor, _open(editor, x, conv), x.args[1:], conv)
    return editor.call(DequantizePerTensor, *made.args, like=conv, before=conv)


def _open(editor: Editor, x: Node, conv: Node) -> Node:
    return editor.call(aten.unflatten.int, x, -1, [-1, 1], like=conv, before=conv)


def _again(editor: Editor, x: Node, qparams: Any, at: Node) -> Node:
    """A value behind a q and a dq of its own, before a node and in its name."""
    stored = editor.call(QuantizePerTensor, x, *qparams, like=at, before=at)
    return editor.call(DequantizePerTensor, stored, *qparams, like=at, before=at)


def _pair(sizes: Any, other: int) -> list[int]:
    first: int = sizes if isinstance(sizes, int) else sizes[0]
    return [first, other]


_ONE = 127
"""The integer that every weight is; 1/elements is stored exactly as 127 * scale."""


@graph_pass(needs=(HAS_VALUES,), gives=())
def pool_by_depthwise(gm: torch.fx.GraphModule) -> PassResult:
    """Write a quantized average pool as a depthwise convolution with equal weights.

    Before:  q(avg_pool2d(dq(x_q), [2, 2]))
    After:   q(conv2d(dq(x_q), dq(weight_q), stride=[2, 2], groups=C)), weight_q 127 everywhere
    """
    return rewrite(gm, (Rule("avg_pool2d", find=Op(AVG_POOL2D, Var("x")), build=_build),))


def _build(m: Match, editor: Editor) -> Node | Skip:
    x, pool = m["x"], m.anchor
    if not is_dequantize(x) or sole_quantize(pool) is None:
        return Skip("it is float")
    channels = x.meta["val"].shape[1]
    kernel = each_axis(argument(pool, "kernel_size"), 2)
    stride = each_axis(argument(pool, "stride") or kernel, 2)
    padding = each_axis(argument(pool, "padding"), 2)
    counts_whole = argument(pool, "count_include_pad") or not any(padding)
    if not isinstance(channels, int) or argument(pool, "ceil_mode") or not counts_whole:
        return Skip("its windows count different numbers of elements")
    elements = argument(pool, "divisor_override") or kernel[0] * kernel[1]
    integers = torch.full((channels, 1, *kernel), _ONE, dtype=torch.int8)
    weight = editor.constant(f"{pool.name}.weight_q", integers, like=pool)
    scale = 1.0 / (_ONE * elements)
    held = editor.call(DequantizePerTensor, weight, scale, 0, -_ONE, _ONE, torch.int8, like=pool)
    return editor.call(
        aten.conv2d.default, x, held, None, stride, padding, [1, 1], channels, like=pool
    )

"""Operators of volumes, which neither XNNPACK nor ExecuTorch has, as operators of images."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import GraphModule

from pt2e_quant.accelerate.recompile import recompile
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass
from pt2e_quant.passes.functions.rows import adaptive_max_pool
from pt2e_quant.passes.functions.write_functions import write_out


@graph_pass(needs=(), gives=())
def volumes_as_images(gm: GraphModule) -> PassResult:
    """Write convolutions and pools of volumes as those of images.

    A conv3d is one conv2d whose channels are the images under each step of the depth. The K images
    of a channel stand side by side, so groups of channels stay what they are, and the weight is
    the same memory. In the quantized graph it is an int8 conv2d like any other. A pool is one of
    the images and one of the depth.

    Before:  conv3d(x, w, b)                                x: [N, C, D, H, W], w: [O, C, K, 3, 3]
    After:   conv2d(images(x), w.reshape(O, C * K, 3, 3), b)   images(x): [N * D', C * K, H, W]
    """
    calls = [n for n in gm.graph.nodes if str(n.target) in _VOLUMES]
    written = [n for n in calls if write_out(gm, n, _VOLUMES[str(n.target)], is_canonical=True)]
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
    taps, strides, dilations = weight.shape[2], _three(stride), _three(dilation)
    if isinstance(padding, str):
        more = [
            d * (k - 1) * (padding == "same")
            for d, k in zip(dilations, weight.shape[2:], strict=True)
        ]
        x = F.pad(x, [side for m in reversed(more) for side in (m // 2, m - m // 2)])
        padding = (0,)
    pads = _three(padding)
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
    strides, pads, ends, steps = map(_three, (stride, padding, output_padding, dilation))
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

    windows = [_three(v) for v in (kernel_size, stride or kernel_size, padding, dilation)]
    return _pooled(x, pool, windows, (1, 1, 0, 1))


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

    windows = [_three(v) for v in (kernel_size, stride or kernel_size, padding)]
    made = _pooled(x, pool, windows, (1, 1, 0))
    return made if divisor_override is None else made / divisor_override


def _adaptive_avg_pool3d(x: Tensor, output_size: Any) -> Tensor:
    lead = x.shape[:-3]
    rows = F.adaptive_avg_pool2d(x.flatten(0, -4) if x.dim() > 4 else x, output_size[1:])
    sizes = rows.shape[-2:]
    rows = F.adaptive_avg_pool2d(rows.flatten(-2), (output_size[0], sizes.numel()))
    return torch.unflatten(torch.unflatten(rows, -1, sizes), 0, lead)


def _three(value: Sequence[int]) -> list[int]:
    return [*value] * 3 if len(value) == 1 else [*value]


_VOLUMES: Mapping[str, Callable[..., Any]] = {
    "aten.adaptive_avg_pool3d.default": _adaptive_avg_pool3d,
    "aten.adaptive_max_pool3d.default": adaptive_max_pool,
    "aten.avg_pool3d.default": _avg_pool3d,
    "aten.conv3d.default": _conv3d,
    "aten.conv3d.padding": _conv3d,
    "aten.conv_transpose3d.input": _conv_transpose3d,
    "aten.max_pool3d.default": _max_pool3d,
}

"""Norms in the operators that the delegate has.

ExecuTorch's kernels stand between two partitions of the delegate, run on one thread and find the
variance as a difference of squares. `benchmarks/delegated_functions.py` has the times of both.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn import functional

from pt2e_quant.graph.editor import Editor
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import PERMUTE, arguments, aten, is_call
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.rewrite import Skip
from pt2e_quant.passes.functions.layers import affine

_WIDEST_ROW, _FEWEST_ROWS = 192, 128
"""Of a layer norm over the last axis: wider ones, and fewer rows, take ExecuTorch's kernel no
longer than these operators take."""
_CHANNELS_LAST, _CHANNELS_FIRST = [0, 2, 3, 1], [0, 3, 1, 2]


def _group_norm(
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:
    """Means of channels first, then of their groups: the image keeps the form that it has."""
    channels = x.shape[1]
    image = _image(x)

    def mean(y: Tensor) -> Tensor:
        means = y.mean((2, 3), keepdim=True)
        if num_groups == channels:
            return means
        grouped = means.reshape(-1, num_groups, channels // num_groups).mean(-1, keepdim=True)
        if num_groups == 1:
            return grouped.unsqueeze(-1)
        # A product with ones, because the delegate does not expand.
        spread = functional.linear(grouped, torch.full((channels // num_groups, 1), 1.0))
        return spread.reshape(-1, channels, 1, 1)

    apart = image - mean(image)
    factor = torch.rsqrt(mean(apart * apart) + eps)
    if weight is not None:
        factor = factor * weight.reshape(1, -1, 1, 1)
    y = apart * factor
    y = y if bias is None else y + bias.reshape(1, -1, 1, 1)
    return y if x.dim() == 4 else y.reshape(x.shape)


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _group_norm(x, x.shape[1], weight, bias, eps)


def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Tensor:
    apart = x - x.mean(-1, keepdim=True)
    y = apart * torch.rsqrt((apart * apart).mean(-1, keepdim=True) + eps)
    return affine(y, weight, bias, normalized_shape)


def _image(x: Tensor) -> Tensor:
    """[N, C, H, W] of any number of axes behind the channels."""
    if x.dim() == 4:
        return x
    return x.reshape(*x.shape[:2], math.prod(x.shape[2:-1]), x.shape[-1])


NORMS: Mapping[str, Callable[..., Tensor]] = {
    "aten.group_norm.default": _group_norm,
    "aten.instance_norm.default": _instance_norm,
    "aten.layer_norm.default": _layer_norm,
}
"""By operator: what to trace in its place."""


def norm_of_channels(m: Match, editor: Editor) -> Node | Skip:
    """Write a layer norm of channels in front of the move of axes that was made for it.

    Before:  permute(layer_norm(permute(x, [0, 2, 3, 1])), [0, 3, 1, 2])
    After:   mul(d, rsqrt(add(conv2d(mul(d, d), 1/C), eps)))    where d = sub(x, conv2d(x, 1/C))
    """
    norm, moved = m.anchor, m["x"]
    if _order(moved) != _CHANNELS_LAST:
        return Skip("its rows are no channels of images")
    given, x = arguments(norm), moved.all_input_nodes[0]
    channels = x.meta["val"].shape[1]
    factors = {name: given[name] for name in ("weight", "bias") if given[name] is not None}
    values = {name: constant_of(editor.gm, node) for name, node in factors.items()}
    held = {name: value for name, value in values.items() if value is not None}
    if given["normalized_shape"] != [channels] or len(held) < len(factors):
        return Skip("it spans other axes, or its factors are computed")
    if norm.meta["val"].dtype is not torch.float32:
        return Skip("it is not of float32")

    def call(operator: OpOverload, *args: Any) -> Node:
        return editor.call(operator, *args, like=norm)

    def mean(y: Node) -> Node:
        return call(aten.conv2d.default, y, row)

    weight = torch.full((1, channels, 1, 1), 1.0 / channels)
    row = editor.constant(f"mean_of_{channels}_channels", weight, like=norm)
    apart = call(aten.sub.Tensor, x, mean(x))
    variance = mean(call(aten.mul.Tensor, apart, apart))
    y = call(aten.rsqrt.default, call(aten.add.Tensor, variance, given["eps"]))
    y = call(aten.mul.Tensor, apart, y)
    for name, operator in (("weight", aten.mul.Tensor), ("bias", aten.add.Tensor)):
        if name in held:
            value = held[name].reshape(1, -1, 1, 1)
            factor = editor.constant(f"{factors[name].target}_of_channels", value, like=norm)
            y = call(operator, y, factor)
    for back in [user for user in norm.users if _order(user) == _CHANNELS_FIRST]:
        editor.replace(back, y)
    return call(aten.permute.default, y, _CHANNELS_LAST)


def _order(node: Node) -> list[int] | None:
    """The order in which a node puts the axes of images; None if it does not."""
    if not is_call(node, PERMUTE) or node.meta["val"].dim() != 4:
        return None
    sizes = [2, 3, 5, 7]
    permute: Any = node.target
    made = permute(torch.empty(sizes, device="meta"), *node.args[1:], **node.kwargs)
    return [sizes.index(size) for size in made.shape]


def is_faster_written(node: Node) -> bool:
    """True for a norm that `NORMS` has a form for, which takes less time than ExecuTorch's kernel.

    Args:
        node: a norm in float32.
    """
    given, value = arguments(node), node.meta["val"]
    if str(node.target) == "aten.layer_norm.default":
        *ahead, width = value.shape
        if len(given["normalized_shape"]) > 1 or not all(isinstance(n, int) for n in value.shape):
            return False
        return bool(width <= _WIDEST_ROW and math.prod(ahead) >= _FEWEST_ROWS)
    if str(node.target) == "aten.instance_norm.default":
        if not given["use_input_stats"] or given["running_mean"] is not None:
            return False
    # An image is made of other tensors by a reshape, which has one dynamic size in the delegate.
    dynamic = sum(not isinstance(size, int) for size in value.shape)
    is_image = value.dim() == 4 or (value.dim() > 2 and dynamic < 2)
    return bool(is_image) and isinstance(value.shape[1], int)

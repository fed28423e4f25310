"""Calls of edge operators that the XNNPACK delegate does not compute as ATen defines them.

ExecuTorch's payload has no field for some arguments, and XNNPACK refuses some values of others
when the program is loaded. ExecuTorch's partitioner (1.4) looks at neither. Such a call stays
outside of the delegate, where ExecuTorch's own operator runs it.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.fx import Node

_MOST_DIMENSIONS = 6
"""XNN_MAX_TENSOR_DIMS."""


def delegate_runs(node: Node, name: str) -> bool:
    """Whether the delegate computes a call right.

    Args:
        node: of the edge program, or of the ATen program before it.
        name: the operator as ExecuTorch's partitioner names it, for example "elu.default".
    """
    holds = _HOLDS.get(name)
    return _has_few_dimensions(node) and (holds is None or holds(node))


def reads_scalar(node: Node) -> bool:
    """Whether a node reads a value without dimensions that is computed or an input.

    ExecuTorch (1.4) fails on the q/dq of one that is an input, looking for its layout; those of
    constants it takes.
    """
    return any(not _has_dimensions(n) for n in node.all_input_nodes if n.op == "call_function")


def _has_few_dimensions(node: Node) -> bool:
    values = [n.meta.get("val") for n in (node, *node.all_input_nodes)]
    return all(v.dim() <= _MOST_DIMENSIONS for v in values if isinstance(v, Tensor))


def _argument(node: Node, index: int, default: Any) -> Any:
    return node.args[index] if len(node.args) > index else default


def _elu(node: Node) -> bool:
    """The payload has no field for `scale` and `input_scale`; XNNPACK takes a positive alpha."""
    alpha, scale, input_scale = (_argument(node, index, 1) for index in (1, 2, 3))
    return bool(alpha > 0 and scale == 1 and input_scale == 1)


def _has_dimensions(node: Node) -> bool:
    """Whether a value has dimensions, or is a constant behind at most a dequantize."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() > 0:
        return True
    return node.op != "call_function" or all(
        n.op != "call_function" and not n.meta["val"].is_floating_point()
        for n in node.all_input_nodes[:1]
    )


def _is_image(node: Node) -> bool:
    return bool(node.meta["val"].dim() == 4)


def _has_one_dynamic_size(node: Node) -> bool:
    """The delegate's reshape takes no more."""
    return sum(not isinstance(size, int) for size in node.meta["val"].shape) <= 1


def _has_known_window(node: Node) -> bool:
    """The delegate pools along one of the last two dimensions, and keeps it, by a known size."""
    dim, keeps = node.args[1], _argument(node, 2, False)
    value = node.all_input_nodes[0].meta["val"]
    return bool(dim in (2, 3) and keeps and isinstance(value.shape[dim], int))


def _averages_what_it_reads(node: Node) -> bool:
    """The payload has no field for a divisor: windows at the border count fewer elements."""
    stride, padding, divisor = (_argument(node, index, None) for index in (2, 3, 6))
    return _is_image(node) and bool(stride) and (divisor is None or not any(padding or ()))


def _pads_with_a_number(node: Node) -> bool:
    """The payload is written as JSON first, which has no infinities."""
    return math.isfinite(_argument(node, 2, 0) or 0)


def _starts_inside(node: Node) -> bool:
    """ExecuTorch (1.4) adds the size to a negative start, and the payload has no sign."""
    dim, start = _argument(node, 1, 0), _argument(node, 2, 0) or 0
    size = node.all_input_nodes[0].meta["val"].shape[dim]
    return not isinstance(start, int) or not isinstance(size, int) or start >= -size


def _resizes_by_sizes(node: Node) -> bool:
    """The delegate divides the sizes; ATen takes the scales given, unless corners are aligned."""
    scales = _argument(node, 3, None)
    if scales is None or node.args[2]:
        return True
    before = node.all_input_nodes[0].meta["val"].shape[-2:]
    after = node.meta["val"].shape[-2:]
    return all(i * scale == o for i, scale, o in zip(before, scales, after, strict=True))


_HOLDS: Mapping[str, Callable[[Node], bool]] = {
    "avg_pool2d.default": _averages_what_it_reads,
    "constant_pad_nd.default": _pads_with_a_number,
    "dequantize_per_tensor.default": _has_dimensions,
    "elu.default": _elu,
    "max.dim": _has_known_window,
    "max_pool2d.default": _is_image,
    "prelu.default": _is_image,
    "quantize_per_tensor.default": _has_dimensions,
    "slice_copy.Tensor": _starts_inside,
    "unsqueeze_copy.default": _has_one_dynamic_size,
    "upsample_bilinear2d.vec": _resizes_by_sizes,
}

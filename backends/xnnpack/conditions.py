"""Constraints of op-table entries: when XNNPACK runs an operator in integers, each with a text."""

from typing import Any

from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.conditions import rank_of
from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import argument, aten, each_axis
from pt2e_quant.graph.pattern import Match

_EDGES = ("reflect", "replicate", "circular")
_WIDEST_EDGE = 8
"""Each row of an edge is a slice."""


def _one_group(m: Match) -> bool:
    return bool(m.arg("op", "groups") == 1)


def _ends_within_a_stride(m: Match) -> bool:
    dims = m["w"].meta["val"].dim() - 2
    extra, stride = (each_axis(m.arg("op", name), dims) for name in ("output_padding", "stride"))
    return all(e < s for e, s in zip(extra, stride, strict=True))


def _no_ceil(m: Match) -> bool:
    return has_known_image(m.node("x")) or not m.arg("op", "ceil_mode")


def _stride_fits(m: Match) -> bool:
    kernel = each_axis(m.arg("op", "kernel_size"), 2)
    stride = each_axis(m.arg("op", "stride") or kernel, 2)
    return all(s <= k for s, k in zip(stride, kernel, strict=True)) and rank_of(m["x"]) == 4


def _window_is_whole(m: Match) -> bool:
    padded = any(each_axis(m.arg("op", "padding"), 2))
    return (
        rank_of(m["x"]) == 4
        and not m.arg("op", "ceil_mode")
        and (m.arg("op", "count_include_pad") or not padded)
        and isinstance(m["x"].meta["val"].shape[1], int)
    )


def _pads_in_integers(m: Match) -> bool:
    op = m.nodes["op"]
    if pads_by_slices(op):
        return True
    mode = argument(op, "mode") if "mode" in _names(op) else "constant"
    pads = argument(op, "pad")
    return (
        mode == "constant"
        and argument(op, "value") in (None, 0, 0.0)
        and all(isinstance(p, int) and p >= 0 for p in pads)
    )


def has_known_image(node: Node) -> bool:
    """True if the height and the width of an image are known; the batch may be dynamic."""
    return all(isinstance(size, int) for size in node.meta["val"].shape[-2:])


def pads_by_slices(pad: Node) -> bool:
    """True for a pad with values of its input that is few slices of known sizes, joined."""
    if pad.target is not aten.pad.default or argument(pad, "mode") not in _EDGES:
        return False
    pads, x = argument(pad, "pad"), pad.all_input_nodes[0].meta["val"]
    padded = x.shape[x.dim() - len(pads) // 2 :]
    if not all(isinstance(size, int) for size in (*pads, *padded)):
        return False
    return bool(0 <= min(pads) and max(pads) <= _WIDEST_EDGE)


def slices_neighbours(call: Node) -> bool:
    """True for a slice of known length that the delegate has, of ATen or of the edge program.

    Of the other dimensions it takes all, whatever their sizes.
    """
    given: tuple[Any, ...] = (*call.args[1:], *_SLICE_DEFAULTS[len(call.args) - 1 :])
    dim, start, _, step = given
    before, after = (n.meta["val"].shape for n in (call.all_input_nodes[0], call))
    if step != 1 or not isinstance(start or 0, int) or not isinstance(after[dim], int):
        return False
    # ExecuTorch (1.4) adds the size to a negative start, and the payload has no sign.
    if (start or 0) < 0 and not (isinstance(before[dim], int) and start >= -before[dim]):
        return False
    return all(size != 0 for size in (*before, *after) if isinstance(size, int))


_SLICE_DEFAULTS = (0, None, None, 1)
"""Of the arguments behind the tensor: dimension, start, end and step."""


def _names(node: Node) -> set[str]:
    schema: Any = getattr(node.target, "_schema", None)
    return {a.name for a in schema.arguments} if schema is not None else set()


def _plain_gelu(m: Match) -> bool:
    return bool(m.arg("op", "approximate") == "none")


def _even_columns(m: Match) -> bool:
    value = m["w"].meta["val"] if isinstance(m["w"], Node) else None
    return isinstance(value, Tensor) and value.shape[-1] % 2 == 0


def _one_image(m: Match) -> bool:
    return rank_of(m["x"]) == 4 and m["x"].meta["val"].shape[0] == 1


def _not_depthwise(m: Match) -> bool:
    return bool(m.arg("op", "groups") == 1 or m["w"].meta["val"].shape[1] > 1)


def _has_columns(m: Match) -> bool:
    value = m["w"].meta["val"] if isinstance(m["w"], Node) else None
    return isinstance(value, Tensor) and value.shape[-1] > 1


SEVERAL_COLUMNS = Constraint(text="a weight with more than one column", holds=_has_columns)
EVEN_COLUMNS = Constraint(text="a weight with an even number of columns", holds=_even_columns)
ONE_IMAGE = Constraint(
    text="a batch of 1 (the delegate gives each image a scale of its own)", holds=_one_image
)
NOT_DEPTHWISE = Constraint(text="no depthwise convolution", holds=_not_depthwise)
ONE_GROUP = Constraint(text="groups == 1 with one scale per output channel", holds=_one_group)
ENDS_WITHIN_A_STRIDE = Constraint(
    text="an output padding smaller than the stride", holds=_ends_within_a_stride
)
WEIGHT_IS_MATRIX = Constraint(text="a weight (N, K)", holds=lambda m: rank_of(m["w"]) == 2)
NO_CEIL_IF_DYNAMIC = Constraint(text="no ceil_mode with a dynamic height or width", holds=_no_ceil)
STRIDE_FITS_KERNEL = Constraint(
    text="a batched input, and a stride no larger than the kernel", holds=_stride_fits
)
WINDOW_IS_WHOLE = Constraint(
    text="windows that all count the same number of elements, and a known channel count",
    holds=_window_is_whole,
)
ONE_DYNAMIC_SIZE = Constraint(
    text="at most one dynamic size",
    holds=lambda m: sum(not isinstance(s, int) for s in m.anchor.meta["val"].shape) <= 1,
)
PADS_IN_INTEGERS = Constraint(
    text=f"padding with 0, or up to {_WIDEST_EDGE} values of the input on a side, of known sizes",
    holds=_pads_in_integers,
)
TANH_IS_EXACT = Constraint(text="approximate='none'", holds=_plain_gelu)

"""The numbers of a convolution in a graph: one for each spatial axis, padding without names."""

from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from pt2e_quant.graph.op_table import Constraint
from pt2e_quant.graph.ops import argument, each_axis, each_padding
from pt2e_quant.graph.pattern import Match
from pt2e_quant.graph.sum_lengths import LONGEST_SUM


def weight_of(conv: Node) -> Tensor:
    """The fake value of the weight: [O, C / groups, *kernel]."""
    weight: Any = argument(conv, "weight")
    found: Tensor = weight.meta["val"]
    return found


def per_axis(conv: Node, name: str) -> list[int]:
    """Stride or dilation with a number for each spatial axis."""
    return each_axis(argument(conv, name), weight_of(conv).dim() - 2)


def even_padding(conv: Node) -> list[int] | None:
    """Padding with a number for each spatial axis, None where "same" pads unevenly."""
    kernel = weight_of(conv).shape[2:]
    pads = each_padding(argument(conv, "padding"), kernel, per_axis(conv, "dilation"))
    return None if any(before != behind for before, behind in pads) else [pad for pad, _ in pads]


def _windows_meet_image(match: Match) -> bool:
    """True if every window covers at least one pixel on each axis, at any size that may come."""
    conv = match.nodes["op"]
    padding = even_padding(conv)
    if padding is None:
        return False
    source: Any = argument(conv, "input")
    axes = zip(
        padding,
        per_axis(conv, "dilation"),
        weight_of(conv).shape[2:],
        source.meta["val"].shape[2:],
        strict=True,
    )
    return all(
        pad == 0 or (pad <= gap * (taps - 1) and statically_known_true(size >= gap))
        for pad, gap, taps, size in axes
    )


SUMS_FIT = Constraint(
    text=f"at most {LONGEST_SUM} weights for an output channel",
    holds=lambda match: weight_of(match.nodes["op"])[0].numel() <= LONGEST_SUM,
)
"""Sums of products of 8 bits that int32 holds: matrix units wrap around, or saturate."""

EVEN_PADDING = Constraint(
    text="padding that is the same on both sides",
    holds=lambda match: even_padding(match.nodes["op"]) is not None,
)

WINDOWS_MEET_IMAGE = Constraint(
    # oneDNN 3.12 leaves results of rows that lie wholly in the padding as memory was.
    text="no window that lies wholly in the padding",
    holds=_windows_meet_image,
)

"""Float operators on images that keep the layout of the convolutions around them.

Convolutions in integers have a runtime keep images with channels last, those in float in blocks of
channels. What computes each element alone in float takes either, and images change their layout
once, somewhere between the two.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.in_float import behind_clips, real_of
from pt2e_quant.core.qdq import is_dequantize, is_quantize
from pt2e_quant.graph.ops import (
    ACTIVATIONS,
    ADD,
    BATCH_NORM,
    CONV2D,
    DIV,
    MUL,
    SUB,
    is_call,
)

_IMAGE_DIMS = 4
_KEEPS = (*ACTIVATIONS, *ADD, *SUB, *MUL, *DIV, *BATCH_NORM)


@dataclass(eq=False, slots=True)
class Layout:
    """One layout for some operators in float, which read each other's results.

    Args:
        operators: they.
        convs: the convolutions whose results they read or that read theirs, and the operator of
            them that is beside each.
    """

    operators: set[Node] = field(default_factory=set)
    convs: dict[Node, Node] = field(default_factory=dict)


def layouts(gm: GraphModule, judged: Collection[Node]) -> list[Layout]:
    """The connected float operators that keep a layout, beside convolutions.

    Args:
        gm: a q/dq graph.
        judged: operators that may be in integers.
    """
    found: dict[Node, Layout] = {}
    for node in gm.graph.nodes:
        if not _keeps(node) or node in judged or is_call(behind_clips(gm, node), CONV2D):
            continue
        mine = found[node] = Layout({node})
        for source in _sources(gm, node):
            other = found.get(source)
            if is_call(source, CONV2D):
                mine.convs[source] = node
            elif other is not None and other is not mine:
                mine = _join(found, mine, other)
        for reader in _readers(node):
            if is_call(reader, CONV2D):
                mine.convs[reader] = node
    return [one for one in dict.fromkeys(found.values()) if one.convs]


def _join(found: dict[Node, Layout], one: Layout, other: Layout) -> Layout:
    """Put the operators of one layout into the larger other; each moves a few times at most."""
    small, large = sorted((one, other), key=lambda each: len(each.operators))
    large.operators |= small.operators
    large.convs |= small.convs
    found |= dict.fromkeys(small.operators, large)
    return large


def _keeps(node: Node) -> bool:
    value = node.meta.get("val")
    return is_call(node, _KEEPS) and isinstance(value, Tensor) and value.dim() == _IMAGE_DIMS


def _sources(gm: GraphModule, node: Node) -> Iterator[Node]:
    """The operators whose results one reads, through a q/dq and clips behind convolutions."""
    for read in node.all_input_nodes:
        real = real_of(read) if is_dequantize(read) else read
        if real is not None:
            yield behind_clips(gm, real)


def _readers(node: Node) -> Iterator[Node]:
    """The operators that read a result, through a q/dq."""
    for user in node.users:
        if is_quantize(user):
            yield from (reader for dq in user.users for reader in dq.users)
        else:
            yield user

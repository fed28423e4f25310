"""Pairs of layers between which a positive factor per channel can be moved."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Node

from pt2e_quant.graph.ops import (
    ADAPTIVE_AVG_POOL2D,
    AVG_POOL2D,
    CONV,
    DROPOUT,
    IDENTITIES,
    LEAKY_RELU,
    LINEAR,
    MAX_POOL2D,
    MEAN,
    RELU,
    RELU6,
    RESHAPE,
    argument,
    is_call,
)
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.grid import Declined

LAYERS = (*LINEAR, *CONV)
_OF_ELEMENTS = (*RELU, *LEAKY_RELU, *IDENTITIES, *DROPOUT)
_POOLS = (*MAX_POOL2D, *AVG_POOL2D, *ADAPTIVE_AVG_POOL2D)


@dataclass(frozen=True, slots=True)
class LayerPair:
    """A layer, and the layers that alone read what it makes.

    Args:
        first: a linear or convolution.
        between: the nodes on the way, in order: f(s * x) = s * f(x) for s > 0, channel by channel.
        readers: linears or convolutions.
    """

    first: Node
    between: tuple[Node, ...]
    readers: tuple[Node, ...]


def layer_pairs(graph: AlgorithmGraph) -> Iterator[LayerPair | tuple[Node, Declined]]:
    """The pairs of a graph, or why a layer that feeds others is in none, in graph order."""
    for first in graph.calls(LAYERS):
        try:
            found = _pair(first)
        except Declined as reason:
            yield first, reason
            continue
        if found is not None:
            yield found


def _pair(first: Node) -> LayerPair | None:
    """The pair that a layer begins; None where it feeds no layer, as the last of a model."""
    between: list[Node] = []
    node = first
    while True:
        users = list(node.users)
        if any(user.op == "output" for user in users):
            return None
        if all(is_call(u, LAYERS) and argument(u, "input") is node for u in users):
            _check_channels(first, node, users)
            return LayerPair(first, tuple(between), tuple(users))
        if len(users) > 1:
            raise Declined(f"{node.name} is read by {', '.join(user.name for user in users)}")
        node = users[0]
        if reason := _minds(node, first):
            raise Declined(reason)
        between.append(node)


def _minds(node: Node, first: Node) -> str | None:
    """Why an operator minds a factor per channel of its input, None if it does not."""
    source = node.all_input_nodes[0] if node.all_input_nodes else None
    if is_call(node, _OF_ELEMENTS):
        return None
    if is_call(node, RELU6):
        return f"{node.name} clips all channels at 6"
    is_image = is_call(first, CONV) and source is not None and source.meta["val"].dim() == 4
    if is_image and is_call(node, _POOLS):
        return None
    if is_image and is_call(node, MEAN) and 1 not in [d % 4 for d in argument(node, "dim") or (1,)]:
        return None
    before, after = _shape(source), _shape(node)
    if is_image and is_call(node, RESHAPE) and set(before[2:]) == {1} and after == before[:2]:
        return None
    return f"{node.name} is no function of one channel that keeps factors"


def _shape(node: Node | None) -> Sequence[object]:
    return () if node is None else tuple(node.meta["val"].shape)


def _check_channels(first: Node, source: Node, readers: Sequence[Node]) -> None:
    """Raise Declined where the readers' input channels are not the layer's output channels."""
    channels = argument(first, "weight").meta["val"].shape[0]
    value = source.meta["val"]
    for reader in readers:
        # of images [N, C, …] and [C, …], of rows [..., C]
        rank = argument(reader, "weight").meta["val"].dim()
        axis = -1 if is_call(reader, LINEAR) else 1 - rank
        is_same_layout = is_call(first, LINEAR) == is_call(reader, LINEAR) or value.dim() == 2
        if not is_same_layout or value.shape[axis] != channels:
            raise Declined(f"the channels of {source.name} are not those of {first.name}")

"""Which nodes draw random numbers: two runs of a graph agree only in front of them."""

from collections.abc import Callable

import torch
from torch.fx import Graph, Node

from pt2e_quant.graph.alias import nested_graphs, subgraph_of
from pt2e_quant.graph.ops import arguments

_UNTAGGED = frozenset(
    {"feature_dropout", "feature_alpha_dropout", "rrelu", "normal", "normal_functional"}
)
"""ATen's operators that draw and do not have torch's tag."""
_SWITCHES = ("train", "training")
_SHARES = ("p", "dropout", "dropout_p")
"""Names of the arguments without which, or with 0 of which, an operator draws nothing."""


def draws(node: Node) -> bool:
    """True if a node draws random numbers, itself or in a body of control flow.

    A dropout that drops nothing, as in evaluation, draws none; neither does attention or a
    recurrent layer without dropout.
    """
    if node.op == "get_attr":
        body = subgraph_of(node)
        graphs = () if body is None else nested_graphs(body)
        return any(draws(inner) for graph in graphs for inner in graph.graph.nodes)
    if node.op != "call_function":
        return False
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        name = str(node.target).split(".")
        if name[0] != "aten" or name[1] not in _UNTAGGED:
            return False
    given = arguments(node)
    is_off = any(given[name] is False for name in _SWITCHES if name in given)
    shares = [given[name] for name in _SHARES if name in given]
    return not is_off and all(share != 0 for share in shares if isinstance(share, (int, float)))


def reached(graph: Graph, starts: Callable[[Node], bool]) -> set[Node]:
    """The nodes of which this holds, and all that read them, directly or not."""
    found: set[Node] = set()
    for node in graph.nodes:
        if starts(node) or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found

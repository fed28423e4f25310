"""The functions of each element of one tensor that stand behind it in a graph."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import (
    ACTIVATIONS,
    ADD,
    DIV,
    MAXIMUM,
    MINIMUM,
    MUL,
    SUB,
    Overloads,
    is_call,
)
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph

_OF_ELEMENTS: Overloads = (
    *ACTIVATIONS,
    *(*MUL, *ADD, *SUB, *DIV, *MAXIMUM, *MINIMUM),
)
"""Operators that compute each element from one of each operand."""
MOST_OPERATORS = 8
"""Behind a tensor, that are followed."""


@dataclass(frozen=True, slots=True)
class Functions:
    """The operators that compute functions of one tensor alone.

    Args:
        start: the tensor, or its observer node.
        nodes: the operators and the observer nodes of their results, in graph order.
        results: those of them that others read.
    """

    start: Node
    nodes: tuple[Node, ...]
    results: tuple[Node, ...]

    def values(
        self, graph: AlgorithmGraph, x: Tensor, through: Callable[[Any, Tensor], Tensor]
    ) -> dict[Node, Tensor]:
        """What all the nodes compute from a value of the start, of any shape.

        Args:
            graph: they stand in.
            x: the value.
            through: what an observer makes of a value.
        """
        known: dict[Node, Any] = {self.start: x}

        def value(node: Node) -> Any:
            if node not in known:
                held = constant_of(graph.gm, node)
                assert held is not None  # `_is_function` has read it
                known[node] = held.reshape(())
            return known[node]

        for node in self.nodes:
            target: Any = node.target
            args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
            observer = graph.observer(node)
            known[node] = (
                target(*args, **kwargs)
                if observer is None
                else through(observer, known[node.all_input_nodes[0]])
            )
        return {node: known[node] for node in (self.start, *self.nodes)}


def functions_behind(
    graph: AlgorithmGraph, start: Node, places: Mapping[Node, int]
) -> Functions | None:
    """The functions of a tensor; None where something else reads it or there are none.

    Args:
        graph: an algorithm's.
        start: the tensor, or its observer node.
        places: of nodes in the graph.
    """
    nodes, results = {start: None}, dict[Node, None]()
    operators, pending = 0, set(start.users)
    while pending:
        node = min(pending, key=places.__getitem__)
        pending.remove(node)
        is_function = operators < MOST_OPERATORS and _is_function(graph, node, nodes)
        if is_function or graph.observer(node) is not None:
            operators += is_function
            nodes[node] = None
            pending |= set(node.users)
            continue
        read = [source for source in node.all_input_nodes if source in nodes]
        if start in read:
            return None
        results |= dict.fromkeys(read)
    _, *behind = nodes
    return Functions(start, tuple(behind), tuple(results)) if operators else None


def _is_function(graph: AlgorithmGraph, node: Node, inside: Container[Node]) -> bool:
    """True if a node computes each element from values inside and single numbers alone."""
    if not is_call(node, _OF_ELEMENTS):
        return False
    others = [source for source in node.all_input_nodes if source not in inside]
    values = (constant_of(graph.gm, source) for source in others)
    return all(value is not None and value.numel() == 1 for value in values)

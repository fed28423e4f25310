"""Names of torchao.quantization.pt2e.graph_utils: chains of calls as torch.export records them.

Our own quantizers match dataflow (pattern.py), which needs no record of the source.
"""

import operator
from collections.abc import Callable, Iterable
from itertools import chain, pairwise, product
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.passes.utils.source_matcher_utils import (
    SourcePartition,
    check_subgraphs_connected,
    get_source_partitions,
)
from torch.nn import functional

from pt2e_quant.core.errors import ArgumentError
from pt2e_quant.graph.subgraphs import bfs_trace_with_node_process

__all__ = [
    "bfs_trace_with_node_process",
    "collect_producer_nodes",
    "find_sequential_partitions",
    "get_equivalent_types",
    "update_equivalent_types_dict",
]

_EQUIVALENT: list[set[Any]] = [
    {nn.Conv1d, functional.conv1d},
    {nn.Conv2d, functional.conv2d},
    {nn.AdaptiveAvgPool2d, functional.adaptive_avg_pool2d},
    {nn.ReLU, functional.relu, functional.relu_},
    {nn.BatchNorm2d, functional.batch_norm},
    {nn.Hardtanh, functional.hardtanh, functional.hardtanh_},
    {torch.add, operator.add, operator.iadd, "add", "add_"},
    {torch.mul, operator.mul, operator.imul, "mul", "mul_"},
]
"""Spellings of one operation; `update_equivalent_types_dict` replaces the contents."""


def get_equivalent_types() -> list[set[Any]]:
    """The sets of equal forms in use."""
    return _EQUIVALENT


def update_equivalent_types_dict(
    customized_equivalent_types: list[set[Any]] | None = None,
) -> None:
    """Use other sets of equal forms from now on, in the whole process.

    Raises:
        ArgumentError: there are none.
    """
    if customized_equivalent_types is None:
        raise ArgumentError("customized_equivalent_types must be a list of sets, found None")
    _EQUIVALENT[:] = customized_equivalent_types


def _forms(kind: Any) -> list[Any]:
    return [kind, *chain.from_iterable(group - {kind} for group in _EQUIVALENT if kind in group)]


def find_sequential_partitions(
    gm: GraphModule,
    partition_types: list[Any],
    include_functional_equivalent: bool = True,
    filter_fn: Callable[[Node], bool] | None = None,
) -> list[tuple[SourcePartition, ...]]:
    """Chains of source partitions of the given kinds, each of which feeds the next.

    Args:
        gm: an exported graph.
        partition_types: module classes or functions, first to last.
        include_functional_equivalent: kept for scripts that set it; equal forms always count.
        filter_fn: nodes of partitions that count.

    Raises:
        ArgumentError: two of the kinds are the same operation.
    """
    seen: set[Any] = set()
    for kind in partition_types:
        names = set(_forms(kind))
        if seen & names:
            raise ArgumentError(f"each of the kinds must be another operation, found {kind} twice")
        seen |= names
    found = [
        list(chain.from_iterable(get_source_partitions(gm.graph, _forms(kind), filter_fn).values()))
        for kind in partition_types
    ]
    return [candidate for candidate in product(*found) if _is_chain(candidate)]


def _is_chain(members: Iterable[SourcePartition]) -> bool:
    return all(check_subgraphs_connected(first, second) for first, second in pairwise(members))


def collect_producer_nodes(node: Node) -> list[Node] | None:
    """A node and all that it is computed from; None if a model input is among them."""
    found = [node]
    frontier = [node]
    while frontier:
        current = frontier.pop()
        for source in (*current.args, *current.kwargs.values()):
            if not isinstance(source, Node):
                continue
            if source.op == "placeholder":
                return None
            found.append(source)
            if not (source.op == "call_function" and source.target is getattr):
                frontier.append(source)
    return found

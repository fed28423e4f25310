"""Move annotations to the nodes that replaced the annotated ones."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import Graph, Node

from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode, SpecKind, kind_of


@dataclass(slots=True)
class Remap:
    """The nodes that replaced others.

    Args:
        edges: (producer, consumer) to the new producer that the consumer reads.
        outputs: a node to the one that now gives its value.
    """

    edges: dict[tuple[Node, Node], Node] = field(default_factory=dict)
    outputs: dict[Node, Node] = field(default_factory=dict)


def remap_annotations(graph: Graph, remap: Remap) -> None:
    """Rewrite the annotations of a graph, and what their specs refer to; one walk."""
    for node in list(graph.nodes):
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None:
            _remap(node, annotation, remap)


def _remap(node: Node, annotation: Any, remap: Remap) -> None:
    def read_as(source: Node, reader: Node) -> Node:
        return remap.edges.get((source, reader), remap.outputs.get(source, source))

    def place(old: EdgeOrNode) -> EdgeOrNode:
        if isinstance(old, Node):
            return remap.outputs.get(old, old)
        source, reader = old
        return read_as(source, reader), reader

    changed = copy.copy(annotation)  # another node may carry the same object
    changed.input_qspec_map = {
        read_as(source, node): _remapped(spec, place)
        for source, spec in annotation.input_qspec_map.items()
    }
    output = _remapped(annotation.output_qspec, place)
    after = remap.outputs.get(node)
    if after is None:
        changed.output_qspec = output
    else:
        changed.output_qspec = None
        moved = copy.copy(annotation)
        moved.input_qspec_map, moved.output_qspec = {}, output
        after.meta[Q_ANNOTATION_KEY] = moved
    node.meta[Q_ANNOTATION_KEY] = changed


def _remapped(spec: Any, place: Callable[[EdgeOrNode], EdgeOrNode]) -> Any:
    kind = None if spec is None else kind_of(spec)
    if kind is SpecKind.SHARED:
        return replace(spec, edge_or_node=place(spec.edge_or_node))
    if kind is SpecKind.DERIVED:
        return replace(spec, derived_from=[place(source) for source in spec.derived_from])
    return spec

"""Qparam groups: edges and outputs that have equal qparams, joined by union-find.

Cycles, self-references and forward references are fine by construction: sharing is a relation
between places, not a chain of pointers to follow.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import AnnotationError
from pt2e_quant.core.specs import Q_ANNOTATION_KEY, EdgeOrNode, SpecKind, kind_of

_SAME = (
    "dtype",
    "is_dynamic",
    "quant_min",
    "quant_max",
    "qscheme",
    "ch_axis",
    "scale",
    "zero_point",
    "scheme",
)


@dataclass(slots=True, eq=False)
class Group:
    """Places with one set of qparams.

    Args:
        index: its number, in graph order.
        spec: the spec that makes its observer.
        places: edges and nodes, in graph order.
        sources: the groups that a derived spec reads.
    """

    index: int
    spec: Any
    places: list[EdgeOrNode] = field(default_factory=list)
    sources: list["Group"] = field(default_factory=list)


class _UnionFind:
    def __init__(self, places: Iterable[EdgeOrNode]) -> None:
        self.parent = {p: p for p in places}

    def find(self, place: EdgeOrNode) -> EdgeOrNode:
        root = place
        while self.parent[root] != root:
            root = self.parent[root]
        while self.parent[place] != root:
            self.parent[place], place = root, self.parent[place]
        return root

    def union(self, first: EdgeOrNode, second: EdgeOrNode) -> None:
        self.parent[self.find(second)] = self.find(first)


def collect_groups(gm: GraphModule) -> dict[EdgeOrNode, Group]:
    """Every annotated edge and output with its group.

    Raises:
        AnnotationError: a spec shares with or derives from a place that has none, sharing runs
            in a circle with no spec of its own, or an object is no spec.
    """
    specs = _read_annotations(gm)
    sets = _UnionFind(specs)
    for place, spec in specs.items():
        if kind_of(spec) is SpecKind.SHARED:
            sets.union(_target(place, spec.edge_or_node, specs, "shares with"), place)
    _share_implicitly(specs, sets, _root_specs(specs, sets))
    roots = _root_specs(specs, sets)
    _check_rooted(specs, sets, roots)
    groups: dict[EdgeOrNode, Group] = {}
    found: dict[EdgeOrNode, Group] = {}
    for place in specs:
        root = sets.find(place)
        if root not in groups:
            groups[root] = Group(index=len(groups), spec=roots[root])
        groups[root].places.append(place)
        found[place] = groups[root]
    for group in groups.values():
        if kind_of(group.spec) is SpecKind.DERIVED:
            place = group.places[0]
            for source in group.spec.derived_from:
                group.sources.append(found[_target(place, source, specs, "derives from")])
    return found


def _read_annotations(gm: GraphModule) -> dict[EdgeOrNode, Any]:
    specs: dict[EdgeOrNode, Any] = {}
    for node in gm.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is None:
            continue
        for source, spec in annotation.input_qspec_map.items():
            if spec is not None:
                specs[source, node] = _checked(spec, node, f"input {source}")
                if source not in node.all_input_nodes:
                    raise AnnotationError(
                        f'the annotation is for input "{source}", which is not one of the inputs '
                        f"{[n.name for n in node.all_input_nodes]}",
                        node=node,
                        fix="annotate after the last edit of the graph",
                    )
        if annotation.output_qspec is not None:
            specs[node] = _checked(annotation.output_qspec, node, "output")
    return specs


def _checked(spec: Any, node: Node, where: str) -> Any:
    if kind_of(spec) is None:
        raise AnnotationError(
            f"{where} is annotated with a {type(spec).__name__}, which is no quantization spec",
            node=node,
            fix="use QuantizationSpec, FixedQParams…, Shared… or DerivedQuantizationSpec",
        )
    low, high = getattr(spec, "quant_min", None), getattr(spec, "quant_max", None)
    if low is not None and high is not None and low > high:
        raise AnnotationError(f"{where}: quant_min {low} is above quant_max {high}", node=node)
    return spec


def place_name(place: EdgeOrNode) -> str:
    """The node of an output, or "producer -> consumer" of an edge."""
    return place.name if isinstance(place, Node) else f"{place[0].name} -> {place[1].name}"


def reader_of(place: EdgeOrNode) -> Node:
    """The node of an output, or the consumer of an edge."""
    return place if isinstance(place, Node) else place[1]


def _target(
    place: EdgeOrNode, target: EdgeOrNode, specs: dict[EdgeOrNode, Any], verb: str
) -> EdgeOrNode:
    if target not in specs:
        raise AnnotationError(
            f'"{place_name(place)}" {verb} "{place_name(target)}", which has no spec',
            node=reader_of(place),
            fix="annotate that edge or output too",
        )
    return target


def _root_specs(specs: dict[EdgeOrNode, Any], sets: _UnionFind) -> dict[EdgeOrNode, Any]:
    """The first spec in graph order of each set that is not a reference to another place."""
    roots: dict[EdgeOrNode, Any] = {}
    for place, spec in specs.items():
        if kind_of(spec) is not SpecKind.SHARED:
            roots.setdefault(sets.find(place), spec)
    return roots


def _check_rooted(
    specs: dict[EdgeOrNode, Any], sets: _UnionFind, roots: dict[EdgeOrNode, Any]
) -> None:
    for place in specs:
        if sets.find(place) not in roots:
            raise AnnotationError(
                f'"{place_name(place)}" shares in a circle in which no place has a spec of its own',
                node=reader_of(place),
                fix="give one of them a QuantizationSpec",
            )


def _share_implicitly(
    specs: dict[EdgeOrNode, Any], sets: _UnionFind, roots: dict[EdgeOrNode, Any]
) -> None:
    """Join the edges of one tensor with each other and with its output where specs are equal."""
    first: dict[tuple[Node, tuple[Any, ...]], EdgeOrNode] = {}
    any_of: dict[Node, EdgeOrNode] = {}
    rootless: list[tuple[Node, EdgeOrNode]] = []
    for place in specs:
        producer = place if isinstance(place, Node) else place[0]
        if not isinstance(place, Node):
            annotation = place[1].meta[Q_ANNOTATION_KEY]
            if not getattr(annotation, "allow_implicit_sharing", True):
                continue
        spec = roots.get(sets.find(place))
        if spec is None:
            rootless.append((producer, place))
            continue
        any_of.setdefault(producer, place)
        sets.union(first.setdefault((producer, _identity(spec)), place), place)
    # A circle of references takes the spec that one of its tensors has at another place.
    for producer, place in rootless:
        if producer in any_of:
            sets.union(any_of[producer], place)


def _identity(spec: Any) -> tuple[Any, ...]:
    """A key that is equal for two specs on one tensor that are the same request."""
    return tuple(getattr(spec, name, None) for name in _SAME)

"""Patterns matched on dataflow from an anchor (the last operator) backwards.

    CONV = Op(CONV2D, Var("x"), Var("w"), Var("b"), name="conv")
    for key, m in find_matches(gm.graph, [("conv_relu", op) for op in chain(CONV, RELU)]):
        m.nodes["conv"], m["x"], m.anchor

Patterns are indexed by their anchor's operator, so matching any number of them is one walk.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeAlias, TypeVar

from torch.fx import Graph, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.ops import Target, argument, arguments, is_getitem
from pt2e_quant.graph.terms import (
    Lit,
    Many,
    Op,
    Pattern,
    Step,
    Var,
    chain,
    check_names,
    either_order,
    maybe,
    one_of,
    step,
)

__all__ = [
    "Attempt",
    "Lit",
    "Many",
    "Match",
    "Op",
    "Pattern",
    "Step",
    "Var",
    "Walk",
    "call_behind",
    "chain",
    "either_order",
    "find_matches",
    "maybe",
    "one_of",
    "step",
    "ties",
]

Edge: TypeAlias = tuple[Node, Node]


class Walk:
    """Facts shared by all matches of one walk: the order of nodes, and which are constant."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._constants: frozenset[Node] | None = None
        self._values: dict[Node, tuple[Any, ...]] = {}

    def values(self, call: Node) -> tuple[Any, ...]:
        """A call's arguments in schema order, read once however many patterns ask."""
        found = self._values.get(call)
        if found is None:
            found = self._values[call] = tuple(arguments(call).values())
        return found

    def is_constant(self, node: Node) -> bool:
        """True if a node's value is fixed; found for all nodes at the first question."""
        if self._constants is None:
            self._constants = constant_nodes(self.graph)
        return node in self._constants


@dataclass(slots=True)
class Match:
    """One match of a pattern in a graph.

    Attributes:
        anchor: the node that holds the pattern's result.
        nodes: the operators that have a name in the pattern.
        values: what each `Var` and `Many` stands for.
        covered: the operator nodes of the match in graph order.
    """

    anchor: Node
    walk: Walk = field(repr=False)
    nodes: dict[str, Node] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    uses: dict[str, list[Edge]] = field(default_factory=dict)
    covered: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        """The node or literal of a `Var`, the tuple of nodes of a `Many`."""
        return self.values[name]

    def node(self, name: str) -> Node:
        """The node of a `Var` or of a named operator.

        Raises:
            ConfigError: the name stands for a literal.
        """
        value = self.nodes.get(name, self.values.get(name))
        if not isinstance(value, Node):
            raise ConfigError(f'"{name}" stands for {value!r}, not for a node', node=self.anchor)
        return value

    def edges(self, name: str) -> tuple[Edge, ...]:
        """Every (producer, consumer) through which the match reads a `Var` or `Many`."""
        return tuple(self.uses.get(name, ()))

    def edge(self, name: str) -> Edge:
        """The first (producer, consumer) through which the match reads a `Var`."""
        found = self.uses.get(name)
        if not found:
            raise ConfigError(f'no node is read as "{name}"', node=self.anchor)
        return found[0]

    def arg(self, op: str, name: str) -> Any:
        """An argument of a named operator by its schema name, its default if not given."""
        return argument(self.nodes[op], name)

    def is_constant(self, name: str) -> bool:
        """True if a value is fixed: a literal or None, an unwritten constant, a view of one."""
        value = self.values[name]
        items = value if isinstance(value, tuple) else (value,)
        return all(not isinstance(v, Node) or self.walk.is_constant(v) for v in items)


def call_behind(node: Node) -> Node:
    """The call that makes a value: the node, or behind a getitem of 0 its source."""
    if is_getitem(node) and node.args[1] == 0 and isinstance(node.args[0], Node):
        return node.args[0]
    return node


class Attempt:
    """One pattern tried at one anchor."""

    def __init__(self, anchor: Node, walk: Walk) -> None:
        self.match = Match(anchor, walk)
        self.covered: set[Node] = set()
        self.inside: set[Node] = set()
        """Values that only the pattern's own operators may read."""
        self.conditions = 0

    def op(self, op: Op, value: Node, *, inside: bool) -> bool:
        """Match an operator with the call that makes a value."""
        call = call_behind(value)
        overload = op.overload_of(call)
        if overload is None:
            return inside and self._through(op, value)
        self.conditions += len(overload.fixed)
        if inside and op.users is not None:
            users = len(value.users)
            if users != op.users or (call is not value and len(call.users) != 1):
                return False
            self.inside.add(value)
        if op.where is not None and not op.where(call):
            return False
        if op.name and self.match.nodes.setdefault(op.name, call) is not call:
            return False
        self.covered |= {call, value}
        if not op.args:
            return True
        values = self.match.walk.values(call)
        if len(op.args) > len(values):
            return False
        return all(self.value(p, v, call) for p, v in zip(op.args, values, strict=False))

    def _through(self, op: Op, value: Node) -> bool:
        """Match an operator behind an optional one between it and its reader."""
        if value.op != "call_function" or value.target not in op.through:
            return False
        if len(value.users) != 1 or not value.args or not isinstance(value.args[0], Node):
            return False
        self.covered.add(value)
        return self.op(op, value.args[0], inside=True)

    def value(self, pattern: Pattern, value: Any, consumer: Node) -> bool:
        """Match one argument of a call."""
        if isinstance(pattern, Op):
            return (
                isinstance(value, Node)
                and value.op == "call_function"
                and self.op(pattern, value, inside=True)
            )
        if isinstance(pattern, Lit):
            return not isinstance(value, Node) and bool(value == pattern.value)
        if isinstance(pattern, Many):
            if not isinstance(value, (list, tuple)):
                return False
            items = tuple(value)
            if not items or not all(isinstance(v, Node) for v in items):
                return False
            return self._bind(pattern.name, items, items, consumer)
        if pattern.where is not None and not pattern.where(value):
            return False
        producers = (value,) if isinstance(value, Node) else ()
        return self._bind(pattern.name, value, producers, consumer)

    def _bind(self, name: str, value: Any, producers: Sequence[Node], consumer: Node) -> bool:
        values = self.match.values
        if name in values:
            known = values[name]
            same = known is value or (not isinstance(value, Node) and known == value)
            if not same:
                return False
        values[name] = value
        self.match.uses.setdefault(name, []).extend((p, consumer) for p in producers)
        return True


K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Indexed(Generic[K]):
    """A pattern with its index, and the part of its rank that is the same at every match."""

    place: int
    key: K
    op: Op
    width: int
    conditions: int


def _try(indexed: _Indexed[K], anchor: Node, walk: Walk) -> "_Candidate[K] | None":
    attempt = Attempt(anchor, walk)
    if not attempt.op(indexed.op, anchor, inside=False):
        return None
    match = attempt.match
    if any(source in attempt.inside for edges in match.uses.values() for source, _ in edges):
        return None  # an operand too, as in y + y where y is the product: it would be made twice
    match.covered = tuple(sorted(attempt.covered, key=walk.order.__getitem__))
    place = tuple([walk.order[n] for n in match.covered])
    rank = -indexed.width, -indexed.conditions - attempt.conditions
    return _Candidate(rank, place, indexed.place, indexed.key, match)


def _index(patterns: Sequence[tuple[K, Op]]) -> dict[Target, list[_Indexed[K]]]:
    """The patterns by the operators that their anchors may call."""
    found: dict[Target, list[_Indexed[K]]] = {}
    for place, (key, op) in enumerate(patterns):
        check_names(op)
        indexed = _Indexed(place, key, op, op.width, op.conditions)
        for target in {s.target for s in op.members}:
            found.setdefault(target, []).append(indexed)
    return found


@dataclass(slots=True)
class _Candidate(Generic[K]):
    rank: tuple[int, int]
    place: tuple[int, ...]
    index: int
    key: K
    match: Match


def _candidates(
    graph: Graph,
    patterns: Sequence[tuple[K, Op]],
    accept: Callable[[K, Match], bool] | None,
) -> list[_Candidate[K]]:
    index = _index(patterns)
    walk = Walk(graph)
    found: list[_Candidate[K]] = []
    for node in graph.nodes:
        if node.op != "call_function" or isinstance(node.meta.get("val"), (list, tuple)):
            continue  # a call with several results is matched at the getitem of the first
        target: Any = call_behind(node).target
        for indexed in index.get(target, ()):
            candidate = _try(indexed, node, walk)
            if candidate is not None and (accept is None or accept(indexed.key, candidate.match)):
                found.append(candidate)
    return found


def find_matches(
    graph: Graph,
    patterns: Sequence[tuple[K, Op]],
    accept: Callable[[K, Match], bool] | None = None,
) -> list[tuple[K, Match]]:
    """Every place where one of the patterns holds, in graph order of the anchors.

    Matches do not overlap: the widest wins, then the one that sets more conditions, then the
    one that stands earlier in the graph. The order of the patterns never matters. A match that
    `accept` turns down claims nothing, so that a narrower one can have its nodes.

    Raises:
        ConfigError: two patterns of different keys claim the same nodes with equal right.
    """
    candidates = _candidates(graph, patterns, accept)
    candidates.sort(key=lambda c: (c.rank, c.place))
    taken: dict[Node, _Candidate[K]] = {}
    chosen: list[_Candidate[K]] = []
    for candidate in candidates:
        holders = [taken[n] for n in candidate.match.covered if n in taken]
        if not holders:
            taken.update(dict.fromkeys(candidate.match.covered, candidate))
            chosen.append(candidate)
            continue
        first = holders[0]
        equal = first.rank == candidate.rank and first.place == candidate.place
        if equal and first.index != candidate.index and first.key != candidate.key:
            raise ConfigError(
                f"two patterns claim the same nodes: {first.key!r} and {candidate.key!r}",
                node=candidate.match.anchor,
                fix="set a condition (a literal, a predicate) in one of them",
            )
    chosen.sort(key=lambda c: c.place[-1])
    return [(c.key, c.match) for c in chosen]


def _overlap(a: Op, b: Op) -> bool:
    """True if one call may match both patterns with equally many fixed arguments."""
    for x in a.members:
        for y in b.members:
            if x.target is not y.target or len(x.fixed) != len(y.fixed):
                continue
            left, right = dict(x.fixed), dict(y.fixed)
            if all(left[k] == right[k] for k in left.keys() & right.keys()):
                return True
    return False


def _can_match_same(a: Pattern, b: Pattern) -> bool:
    """True if two patterns can match one value and cover the same nodes of it."""
    if isinstance(a, Op) and isinstance(b, Op):
        if a.where is not b.where or not _overlap(a, b):
            return False
        return all(_can_match_same(x, y) for x, y in zip(a.args, b.args, strict=False))
    if isinstance(a, Op) or isinstance(b, Op):
        return False
    if isinstance(a, Lit) and isinstance(b, Lit):
        return a.value == b.value
    if isinstance(a, Many) or isinstance(b, Many):
        return not (isinstance(a, Lit) or isinstance(b, Lit))
    return True


def ties(patterns: Iterable[tuple[K, Op]]) -> list[tuple[K, K]]:
    """The pairs of patterns, of equal width and number of conditions, that can match one place.

    Predicates are opaque: two patterns with different `where` count as disjoint here, and
    `find_matches` raises if they turn out not to be.
    """
    groups: dict[tuple[int, int, object], list[tuple[K, Op]]] = {}
    found: list[tuple[K, K]] = []
    for key, op in patterns:
        seen: set[int] = set()
        for target in {s.target for s in op.members}:
            group = groups.setdefault((op.width, op.conditions, target), [])
            for other_key, other in group:
                if id(other) not in seen and _can_match_same(op, other):
                    seen.add(id(other))
                    found.append((other_key, key))
            group.append((key, op))
    return found

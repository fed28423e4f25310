"""Patterns matched on dataflow from an anchor (the last operator) backwards.

    CONV = Op(CONV2D, Var("x"), Var("w"), Var("b"), name="conv")
    for key, m in find_matches(gm.graph, [("conv_relu", op) for op in chain(CONV, RELU)]):
        m.nodes["conv"], m["x"], m.anchor

Patterns are indexed by their anchor's operator, so matching any number of them is one walk.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch.fx import Graph, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.match import Attempt, Match, Walk, call_behind
from pt2e_quant.graph.ops import Target
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
    "Lit",
    "Many",
    "Match",
    "Op",
    "Pattern",
    "Step",
    "Var",
    "chain",
    "either_order",
    "find_matches",
    "maybe",
    "one_of",
    "step",
    "ties",
]

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class _Row(Generic[K]):
    """A pattern with its place among the others, and its rank before conditions that vary."""

    place: int
    key: K
    op: Op
    width: int
    conditions: int


def _try(row: _Row[K], anchor: Node, walk: Walk) -> "_Candidate[K] | None":
    attempt = Attempt(anchor, walk)
    if not attempt.op(row.op, anchor, inside=False):
        return None
    match = attempt.match
    match.covered = tuple(sorted(attempt.covered, key=walk.order.__getitem__))
    place = tuple([walk.order[n] for n in match.covered])
    rank = -row.width, -row.conditions - attempt.conditions
    return _Candidate(rank, place, row.place, row.key, match)


def _index(patterns: Sequence[tuple[K, Op]]) -> dict[Target, list[_Row[K]]]:
    """The patterns by the operators that their anchors may call."""
    found: dict[Target, list[_Row[K]]] = {}
    for place, (key, op) in enumerate(patterns):
        check_names(op)
        row = _Row(place, key, op, op.width, op.conditions)
        for target in {s.target for s in op.members}:
            found.setdefault(target, []).append(row)
    return found


@dataclass(slots=True)
class _Candidate(Generic[K]):
    rank: tuple[int, int]
    place: tuple[int, ...]
    row: int
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
        for row in index.get(target, ()):
            candidate = _try(row, node, walk)
            if candidate is not None and (accept is None or accept(row.key, candidate.match)):
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
        if equal and first.row != candidate.row and first.key != candidate.key:
            raise ConfigError(
                f"two patterns claim the same nodes: {first.key!r} and {candidate.key!r}",
                node=candidate.match.anchor,
                fix="set a condition (a literal, a predicate) in one of them",
            )
    chosen.sort(key=lambda c: c.place[-1])
    return [(c.key, c.match) for c in chosen]


def _overlap(a: Op, b: Op) -> bool:
    """Whether some call is a member of both families with equally many fixed arguments."""
    for x in a.members:
        for y in b.members:
            if x.target is not y.target or len(x.fixed) != len(y.fixed):
                continue
            left, right = dict(x.fixed), dict(y.fixed)
            if all(left[k] == right[k] for k in left.keys() & right.keys()):
                return True
    return False


def _can_match_same(a: Pattern, b: Pattern) -> bool:
    """Whether two patterns can match one value and cover the same nodes of it."""
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

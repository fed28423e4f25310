"""One place where a pattern holds, and how a pattern is tried at an anchor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch.fx import Graph, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.ops import argument, arguments, is_getitem
from pt2e_quant.graph.terms import Lit, Many, Op, Pattern

__all__ = ["Attempt", "Match", "Walk", "call_behind"]

Edge: TypeAlias = tuple[Node, Node]


class Walk:
    """What one walk over a graph knows: the order of its nodes, and which are constant."""

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
        """Whether a node's value is fixed; found for all nodes at the first question."""
        if self._constants is None:
            self._constants = constant_nodes(self.graph)
        return node in self._constants


@dataclass(slots=True)
class Match:
    """Where a pattern was found.

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
        """Whether a value is fixed: a literal or None, an unwritten constant, a view of one."""
        value = self.values[name]
        items = value if isinstance(value, tuple) else (value,)
        return all(not isinstance(v, Node) or self.walk.is_constant(v) for v in items)


def call_behind(node: Node) -> Node:
    """The call that makes a value: the node, or the one whose first result it takes."""
    if is_getitem(node) and node.args[1] == 0 and isinstance(node.args[0], Node):
        return node.args[0]
    return node


class Attempt:
    """One pattern tried at one anchor."""

    def __init__(self, anchor: Node, walk: Walk) -> None:
        self.match = Match(anchor, walk)
        self.covered: set[Node] = set()
        self.conditions = 0

    def op(self, op: Op, value: Node, *, inside: bool) -> bool:
        """Match an operator with the call that makes a value."""
        call = call_behind(value)
        spelling = op.spelling_of(call)
        if spelling is None:
            return inside and self._through(op, value)
        self.conditions += len(spelling.fixed)
        if inside and op.users is not None:
            users = len(value.users)
            if users != op.users or (call is not value and len(call.users) != 1):
                return False
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
        """Match an operator behind one that may stand between it and its reader."""
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

"""A graph as bytes: its nodes in order, and their metadata in one pickle."""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.graph.pickling.pickle_values import FakeValues, reduce_value

__all__ = ["GoneNode", "LocalFunction", "StoredGraph", "is_local", "load_graph", "store_graph"]

_VALUES, _NODE = "values", "node"


@dataclass(frozen=True, slots=True)
class LocalFunction:
    """Stands for a function that could not be pickled."""

    name: str

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Refuse.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            f'the function "{self.name}" was local to another one and is not in this pickle',
            fix="define it at the top of a module, and pickle again",
        )


@dataclass(frozen=True, slots=True)
class GoneNode:
    """Stands for a node that is no longer in the graph."""

    name: str

    def __repr__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class _At:
    """A node among arguments, by its place."""

    place: int


@dataclass(frozen=True, slots=True)
class StoredGraph:
    """A graph: its nodes, their metadata, and what belongs to it as a whole."""

    nodes: bytes
    metas: bytes
    codegen: Any
    tracer_cls: type | None


def is_local(value: object) -> bool:
    """Whether a value is a function that pickle cannot find by its name."""
    return isinstance(value, FunctionType) and (
        "<locals>" in value.__qualname__ or value.__name__ == "<lambda>"
    )


def store_graph(graph: Graph, values: FakeValues) -> StoredGraph:
    """Store a graph whose fake values live in one mode."""
    nodes = list(graph.nodes)
    places = {node: place for place, node in enumerate(nodes)}

    def at(value: Any) -> Any:
        return _At(places[value]) if isinstance(value, Node) else value

    records = [
        (n.op, n.name, n.target, map_aggregate(n.args, at), map_aggregate(n.kwargs, at), n.type)
        for n in nodes
    ]
    tracer = graph._tracer_cls
    return StoredGraph(
        nodes=_dump(records, values, places),
        metas=_dump_metas([n.meta for n in nodes], values, places),
        codegen=graph._codegen,
        tracer_cls=None if tracer is None or "<locals>" in tracer.__qualname__ else tracer,
    )


def _dump_metas(
    metas: Sequence[dict[str, Any]], values: FakeValues, places: dict[Node, int]
) -> bytes:
    """All metadata in one pickle, so that what nodes share stays shared."""
    try:
        return _dump(list(metas), values, places)
    except _UNPICKLABLE:
        fit = [{k: v for k, v in m.items() if _is_fit(v, values, places)} for m in metas]
        return _dump(fit, values, places)


_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, RuntimeError, NotImplementedError)


def _is_fit(value: object, values: FakeValues, places: dict[Node, int]) -> bool:
    try:
        _dump(value, values, places)
    except _UNPICKLABLE:
        return False
    return True


def _dump(value: object, values: FakeValues, places: dict[Node, int]) -> bytes:
    stream = io.BytesIO()
    _Pickler(stream, values, places).dump(value)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, values: FakeValues, places: dict[Node, int]) -> None:
        super().__init__(stream, protocol=pickle.HIGHEST_PROTOCOL)
        self.values = values
        self.places = places

    def persistent_id(self, obj: object) -> tuple[str, int | str] | None:
        if obj is self.values:
            return _VALUES, 0
        if type(obj) is Node:
            return _NODE, self.places.get(obj, obj.name)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
            return _load_operator, _operator_path(obj)
        if is_local(obj):
            return LocalFunction, (obj.__qualname__,)
        if isinstance(obj, type) and "<locals>" in obj.__qualname__:
            return str, (f"{obj.__module__}.{obj.__qualname__}",)
        reduced = reduce_value(obj, self.values)
        return NotImplemented if reduced is None else reduced


def _operator_path(operator: Any) -> tuple[str, ...]:
    if isinstance(operator, OpOverload):
        return (*operator._schema.name.split("::"), operator._overloadname)
    if isinstance(operator, OpOverloadPacket):
        return tuple(operator._qualified_op_name.split("::"))
    return "higher_order", str(operator.__name__)


def load_graph(stored: StoredGraph, values: FakeValues) -> Graph:
    """Make the graph again: names, order and what nodes share are those of the stored one."""
    graph = Graph(tracer_cls=stored.tracer_cls)
    nodes: list[Node] = []

    def node_of(value: Any) -> Any:
        return nodes[value.place] if isinstance(value, _At) else value

    for op, name, target, args, kwargs, kind in _undump(stored.nodes, values, nodes):
        arguments = map_aggregate(args, node_of), map_aggregate(kwargs, node_of)
        nodes.append(graph.create_node(op, target, *arguments, name=name, type_expr=kind))
    for node, meta in zip(nodes, _undump(stored.metas, values, nodes), strict=True):
        node.meta = meta
    graph.set_codegen(stored.codegen)
    return graph


def _undump(data: bytes, values: FakeValues, nodes: list[Node]) -> Any:
    return _Unpickler(io.BytesIO(data), values, nodes).load()


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, values: FakeValues, nodes: list[Node]) -> None:
        super().__init__(stream)
        self.values = values
        self.nodes = nodes

    def persistent_load(self, pid: Any) -> Any:
        kind, which = pid
        if kind == _VALUES:
            return self.values
        return self.nodes[which] if isinstance(which, int) else GoneNode(which)


def _load_operator(*path: str) -> Any:
    found: Any = torch.ops
    for part in path:
        found = getattr(found, part or "default")
    return found

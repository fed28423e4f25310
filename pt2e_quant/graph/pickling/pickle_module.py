"""Pickle graph modules with the metadata of every node, and without retracing.

torch.fx pickles a graph module as Python code and traces that code when it is loaded, which loses
annotations, fake values and module stacks.
"""

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import FunctionType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_aggregate

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.meta import fake_mode_of

Reduced = tuple[Any, tuple[Any, ...]]
"""A function and its arguments, as `__reduce__` returns them."""

# What is known of symbols. Sources, guards and stacks of the trace stay behind: nothing asks for
# them once a program is captured.
_SYMBOLS = (
    "var_to_range",
    "backed_var_to_val",
    "var_to_val",
    "replacements",
    "size_like",
    "divisible",
    "unbacked_symint_counter",
    "frozen",
)


class FakeValues:
    """The mode that a module's fake values live in, and its symbols.

    All graphs of one module share one, so that they still share a mode when they are loaded.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode

    def __reduce__(self) -> Reduced:
        """By the symbols' ranges, samples and relations."""
        env = self.mode.shape_env
        known = None if env is None else {k: v for k, v in vars(env).items() if k in _SYMBOLS}
        return _load_values, (known,)


_VALUES_OF: WeakKeyDictionary[FakeTensorMode, FakeValues] = WeakKeyDictionary()


def values_of(mode: FakeTensorMode) -> FakeValues:
    """The one FakeValues of a mode."""
    return _VALUES_OF.setdefault(mode, FakeValues(mode))


def _load_values(known: dict[str, Any] | None) -> FakeValues:
    env = None
    if known is not None:
        env = ShapeEnv()
        for name, value in known.items():
            if name in vars(env):  # another version of torch may not know it
                setattr(env, name, value)
    return values_of(FakeTensorMode(shape_env=env, allow_non_fake_inputs=True))


@dataclass(frozen=True, slots=True)
class _Shape:
    sizes: tuple[Any, ...]
    strides: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device


def reduce_value(value: object, values: FakeValues) -> Reduced | None:
    """Return the reduction of a fake tensor or a symbolic number; None for anything else."""
    if isinstance(value, FakeTensor):
        sizes, strides = tuple(value.shape), value.stride()
        return _load_tensor, (values, _Shape(sizes, strides, value.dtype, value.device))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = value.node
        hint = node.hint if node.has_hint() else None
        return _load_number, (values, type(value), node.expr, node.pytype, hint)
    return None


def _load_tensor(values: FakeValues, shape: _Shape) -> Tensor:
    if all(type(size) is int for size in (*shape.sizes, *shape.strides)):
        empty = torch.empty_strided(shape.sizes, shape.strides, dtype=shape.dtype, device="meta")
        return FakeTensor(values.mode, empty, shape.device)
    env = values.mode.shape_env
    assert env is not None, "a dynamic size has a symbol"
    with values.mode, env.suppress_guards():
        return torch.empty_strided(
            shape.sizes, shape.strides, dtype=shape.dtype, device=shape.device
        )


def _load_number(values: FakeValues, kind: Any, expr: Any, pytype: type, hint: Any) -> Any:
    return kind(SymNode(expr, values.mode.shape_env, pytype, hint))


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
    """True if a value is a function that pickle cannot find by its name."""
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


# Made again from the graph, or set by torch.export for its own results.
_LEFT_BEHIND = ("_graph", "_code", "_lineno_map", "_prologue_start", "shape_env")


def make_picklable(gm: GraphModule) -> None:
    """Let a graph module pickle with all that its nodes carry; so do its deep copies.

    What a pickle cannot hold of the metadata of nodes is left out: local functions become
    `LocalFunction`, local classes their names. A node that an old annotation still names, but the
    graph no longer has, becomes a `GoneNode`.
    """
    # A graph module has a class of its own, made by GraphModule.__new__.
    type(gm).__reduce_ex__ = _reduce  # type: ignore[assignment,method-assign]
    if _on_copy not in getattr(gm, "_deepcopy_hooks", ()):
        gm._register_deepcopy_hook(_on_copy)


# Saving


def _reduce(gm: GraphModule, protocol: int) -> tuple[Any, ...]:
    _refuse_local_functions(gm)
    values = values_of(fake_mode_of(gm.graph))
    attributes = {k: v for k, v in vars(gm).items() if k not in _LEFT_BEHIND}
    # Bound to the module itself. torch.export's own only raise, and are local functions.
    bound = {k: v.__func__ for k, v in attributes.items() if isinstance(v, MethodType)}
    attributes = {k: v for k, v in attributes.items() if k not in bound}
    methods = {k: f for k, f in bound.items() if "<locals>" not in f.__qualname__}
    stored = store_graph(gm.graph, values)
    return _empty, (type(gm).__name__,), (attributes, methods, values, stored), None, None, _load


def _refuse_local_functions(gm: GraphModule) -> None:
    for name, module in gm.named_modules():
        for attribute, value in vars(module).items():
            if is_local(value) and not isinstance(module, GraphModule):
                raise ConfigError(
                    f'"{name}" cannot be pickled: its {attribute} is the local function '
                    f'"{value.__qualname__}"',
                    fix="define that function at the top of a module",
                )


# Loading


def _empty(class_name: str) -> GraphModule:
    gm = GraphModule.__new__(GraphModule)
    type(gm).__name__ = class_name
    # Filled by `_load`: other parts of the pickle may name the module before that.
    return gm


def _load(gm: GraphModule, state: tuple[Any, ...]) -> None:
    attributes, methods, values, stored = state
    torch.nn.Module.__init__(gm)
    vars(gm).update(attributes)
    for name, function in methods.items():
        setattr(gm, name, MethodType(function, gm))
    gm.shape_env = values.mode.shape_env
    gm.graph = load_graph(stored, values)
    _own_buffers(gm)
    make_picklable(gm)


def _own_buffers(gm: GraphModule) -> None:
    """Give called modules buffers that can grow: torch.load's cannot, and observers resize them."""
    for node in gm.graph.nodes:
        if node.op != "call_module":
            continue
        for module in gm.get_submodule(str(node.target)).modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and not buffer.untyped_storage().resizable():
                    module._buffers[name] = buffer.clone()


# Deep copies


def _on_copy(gm: GraphModule) -> None:
    """Let annotations name the copied nodes: torch copies metadata by reference."""
    make_picklable(gm)
    by_name = {node.name: node for node in gm.graph.nodes}
    for node in gm.graph.nodes:
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None:
            node.meta[Q_ANNOTATION_KEY] = _moved(annotation, by_name)


def _moved(value: Any, by_name: dict[str, Node]) -> Any:
    """A spec or annotation with the nodes of the same names of another graph."""
    if isinstance(value, Node):
        return by_name.get(value.name) or GoneNode(value.name)
    if isinstance(value, (list, tuple)):
        return type(value)(_moved(item, by_name) for item in value)
    if isinstance(value, dict):
        return {_moved(k, by_name): _moved(v, by_name) for k, v in value.items()}
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changes = {
        f.name: moved
        for f in fields(value)
        if f.init
        and (moved := _moved(getattr(value, f.name), by_name)) is not getattr(value, f.name)
    }
    return replace(value, **changes) if changes else value

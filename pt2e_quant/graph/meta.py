"""The metadata of nodes: fake values with symbolic shapes, module stack, stack trace."""

import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.traceback import NodeSource
from torch.utils._pytree import tree_leaves

from pt2e_quant.core.errors import InvariantError, module_path
from pt2e_quant.core.unpack_op import Unpack
from pt2e_quant.graph.alias import is_written, mutated_roots, subgraph_of
from pt2e_quant.graph.ops import CASTS, FILLS_LIKE, VIEWS, Overloads, is_call

__all__ = [
    "ATTENTION_DROPOUT_KEY",
    "CONSTANT_PRESERVING",
    "ORIGIN_KEY",
    "attribute",
    "computes_in_float",
    "constant_nodes",
    "constant_of",
    "copy_trace",
    "fake_cast",
    "fake_constant",
    "fake_mode_of",
    "fake_value",
    "module_path",
    "origin_name",
    "origin_source",
    "source_constant",
]

ORIGIN_KEY = "pt2e_quant.origin"
"""The name of the exported program's node that a node comes from, where `from_node` lacks it."""

TRACE_KEYS = (
    "nn_module_stack",
    "stack_trace",
    "source_fn_stack",
    "from_node",
    ORIGIN_KEY,
    "custom",
)

CONSTANT_PRESERVING: Overloads = (*VIEWS, *CASTS, Unpack)
"""Operators through which a constant is still seen as a constant."""


ATTENTION_DROPOUT_KEY = "pt2e_quant.attention_dropout_p"
"""Under this key of its node: the share of weights that an attention drops in training."""


def copy_trace(node: Node, like: Node) -> None:
    """Give a node the module stack and stack trace of another."""
    for key in TRACE_KEYS:
        if key in like.meta and key not in node.meta:
            node.meta[key] = like.meta[key]


def origin_name(node: Node) -> str:
    """The name of the exported program's node that a node comes from; its own if none is known."""
    if ORIGIN_KEY in node.meta:
        return str(node.meta[ORIGIN_KEY])
    source = origin_source(node)
    return node.name if source is None else str(source.name)


def value_name(node: Node) -> str:
    """The name of a value: of its origin; of the first of several results, of what gives them.

    The first result of a recurrent layer is `gru` in the program, where a `getitem` reads it, as
    in a graph that has the layer's steps instead. Parts of a list, of `split` say, keep theirs.
    """
    if node.target is operator.getitem and node.args[1] == 0:
        source = node.args[0]
        schema = getattr(getattr(source, "target", None), "_schema", None)
        if isinstance(source, Node) and schema is not None and len(schema.returns) > 1:
            return origin_name(source)
    return origin_name(node)


def origin_source(node: Node) -> NodeSource | None:
    """The last entry of the chain in `from_node`; None for a node without one."""
    sources = node.meta.get("from_node")
    if not sources:
        return None
    source: NodeSource = sources[-1]
    while source.from_node:
        source = source.from_node[-1]
    return source


def fake_mode_of(graph: Graph) -> FakeTensorMode:
    """The fake mode of a graph's values, a fresh one if it has none."""
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor):
            return value.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def without_guards(mode: FakeTensorMode) -> Iterator[None]:
    """Keep our own calls from adding guards to the shapes of the user's program.

    The mode's own cache is off meanwhile: with symbolic shapes its keys and entries cost more
    than the calls (half of the time of writing out attention).
    """
    env = mode.shape_env
    cached = mode.cache_enabled
    mode.cache_enabled = cached and env is None
    if env is not None:
        # Numbers of `item` in passes of ExecuTorch whose results are gone: torch would look for
        # them in the next result.
        env.pending_fresh_unbacked_symbols.clear()
    try:
        with nullcontext() if env is None else env.suppress_guards():
            yield
    finally:
        mode.cache_enabled = cached


def fake_constant(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A fake value for a real constant, with static shape."""
    return _fake(mode, tensor, tensor.dtype)


def fake_cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A fake value of another's shape in another type."""
    is_static = all(isinstance(size, int) for size in value.shape)
    if is_static and isinstance(value, FakeTensor) and value.is_contiguous():
        return _fake(value.fake_mode, value, dtype)
    return value.to(dtype)


def _fake(mode: FakeTensorMode, like: Tensor, dtype: torch.dtype) -> Tensor:
    # `mode.from_tensor` and a cast under the mode cost ten times as much, and a graph has one
    # of these for each constant and each quantize.
    shape = torch.empty_strided(like.size(), like.stride(), dtype=dtype, device="meta")
    return FakeTensor(mode, shape, like.device)


def fake_value(mode: FakeTensorMode, target: Any, args: Any, kwargs: Any) -> Any:
    """The value of a call, computed on the `meta["val"]` of its argument nodes.

    Raises:
        InvariantError: an argument node carries no value.
    """

    def value_of(node: Node) -> Any:
        if "val" not in node.meta:
            raise InvariantError(f'node {node.name} carries no meta["val"]', node=node)
        return node.meta["val"]

    fake_args = map_arg(args, value_of)
    fake_kwargs = map_arg(kwargs, value_of)
    # Some composite operators take symbolic sizes in Python alone; pads of constants take them for
    # the numbers that they were exported with.
    is_dynamic = any(
        isinstance(size, torch.SymInt)
        for one in tree_leaves((fake_args, fake_kwargs))
        for size in (one.shape if isinstance(one, Tensor) else (one,))
    )
    dispatcher = enable_python_dispatcher() if is_dynamic else nullcontext()
    with mode, torch.no_grad(), without_guards(mode), dispatcher:
        return target(*fake_args, **fake_kwargs)


def give_values(gm: GraphModule, mode: FakeTensorMode, first: Node, end: Node) -> None:
    """Compute `meta["val"]` of the nodes from one up to another that lack it.

    A call of an operator without a fake kernel, and what reads it, get none.
    """
    while first is not end:
        if first.op == "get_attr" and "val" not in first.meta:
            first.meta["val"] = fake_constant(mode, attribute(gm, str(first.target)))
        elif "val" not in first.meta:
            with suppress(InvariantError, NotImplementedError, RuntimeError):
                first.meta["val"] = fake_value(mode, first.target, first.args, first.kwargs)
        first = first.next


def computes_in_float(node: Node) -> bool:
    """True if a call makes float values, or booleans and integers out of float values.

    A comparison, a place of an extreme and a cast to integers are arithmetic on floats too. What
    asks for a shape alone is none.
    """
    if node.op != "call_function":
        return False
    if _has_floats(node):
        return True
    is_made = bool(_values(node)) and node.target not in _SHAPE_READERS
    return is_made and any(_has_floats(source) for source in node.all_input_nodes)


_SHAPE_READERS = (
    *FILLS_LIKE,
    *(torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default),
)
"""Operators that make booleans or integers of the shape of a float tensor."""


def _values(node: Node) -> list[Tensor]:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return [v for v in values if isinstance(v, Tensor)]


def _has_floats(node: Node) -> bool:
    return any(v.is_floating_point() for v in _values(node))


def attribute(gm: nn.Module, target: str) -> Any:
    """The attribute of a module by its dotted name, None if there is none."""
    value: Any = gm
    for part in target.split("."):
        value = _member(value, part)
        if value is None:
            return None
    return value


def _member(owner: Any, name: str) -> Any:
    """`getattr(owner, name, None)`, in a quarter of its time for what modules hold.

    Python asks `nn.Module.__getattr__` last of all, and it raises for each name that is free.
    """
    if not isinstance(owner, nn.Module) or type(owner).__getattr__ is not nn.Module.__getattr__:
        return getattr(owner, name, None)
    held = owner.__dict__
    for table in ("_modules", "_parameters", "_buffers"):
        found = held[table].get(name)
        if found is not None:
            return found
    return getattr(owner, name, None) if name in held or hasattr(type(owner), name) else None


def _constant_inputs(node: Node) -> Iterable[Node]:
    """The nodes that a constant-preserving call reads, empty if the node is no such call."""
    if isinstance(node.target, OpOverload) and is_call(node, CONSTANT_PRESERVING):
        return node.all_input_nodes
    return ()


def constant_nodes(graph: Graph) -> frozenset[Node]:
    """The nodes whose value is fixed: unwritten constants, views and casts of them, unpacked."""
    written = mutated_roots(graph)
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            if node not in written and subgraph_of(node) is None:
                found.add(node)
        elif node.op == "call_function":
            inputs = _constant_inputs(node)
            if inputs and all(n in found for n in inputs):
                found.add(node)
    return frozenset(found)


def source_constant(node: Node) -> Node | None:
    """The `get_attr` node that a value is a view or cast of, None if it is computed."""
    while node.op != "get_attr":
        inputs = list(_constant_inputs(node))
        if len(inputs) != 1:
            return None
        node = inputs[0]
    return node


def constant_of(gm: GraphModule, node: Node) -> Tensor | None:
    """The tensor that a node always holds: a constant, a view, permute or cast of one, or unpacked.

    A buffer that some node writes is none. The result may share storage with the module's own
    tensor: do not write into it.
    """
    if node.op == "get_attr":
        value = attribute(gm, str(node.target))
        is_fixed = isinstance(value, Tensor) and not is_written(node)
        return value.detach() if is_fixed else None
    if not list(_constant_inputs(node)):
        return None
    held: dict[Node, Tensor] = {}
    for source in node.all_input_nodes:
        tensor = constant_of(gm, source)
        if tensor is None:
            return None
        held[source] = tensor
    target: Any = node.target
    args = map_arg(node.args, held.__getitem__)
    kwargs = map_arg(node.kwargs, held.__getitem__)
    with torch.no_grad():
        result = target(*args, **kwargs)
    return result if isinstance(result, Tensor) else None

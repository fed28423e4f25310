"""Graph modules that pickle as they are: every node with its metadata, no retracing.

torch.fx pickles a graph module as Python code and traces that code when it is loaded, which loses
annotations, fake values and module stacks.
"""

from dataclasses import fields, is_dataclass, replace
from types import MethodType
from typing import Any

import torch
from torch.fx import GraphModule, Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.meta import fake_mode_of
from pt2e_quant.graph.pickling.pickle_graph import GoneNode, is_local, load_graph, store_graph
from pt2e_quant.graph.pickling.pickle_values import values_of

__all__ = ["make_picklable"]

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

"""A graph module of what a `GraphWriter` wrote.

torch.fx makes Python code of a graph and runs it: every name in a file is checked before it can
become part of that code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.core.specs import (
    Q_ANNOTATION_KEY,
    QuantizationAnnotation,
    QuantizationSpecBase,
)
from pt2e_quant.core.tree_specs import load_spec
from pt2e_quant.flow.archive.allowed import (
    is_identifier,
    is_path,
    refuse_imports,
    target_of_name,
)
from pt2e_quant.flow.archive.graph_writer import NODE_META, OWN_PREFIX
from pt2e_quant.flow.archive.held_numbers import read_from
from pt2e_quant.flow.archive.modules import ModuleReader
from pt2e_quant.flow.archive.values import ValueReader

_KEPT = frozenset(vars(nn.Module()))
"""Attributes that torch needs for itself."""

_OPS = ("placeholder", "get_attr", "call_function", "call_module", "output")


@dataclass(frozen=True)
class SavedSpec(QuantizationSpecBase):
    """Stands for the spec of an annotation in a saved graph: its observer is in the graph.

    Args:
        kind: the class that the spec was of.
    """

    kind: str


class GraphReader:
    """Reads graph modules.

    Args:
        values: reads arguments and metadata.
        modules: makes the modules that graphs call.
    """

    def __init__(self, values: ValueReader, modules: ModuleReader) -> None:
        self.values = values
        self.modules = modules
        self._parameters: dict[tuple[int, str], Tensor] = {}

    def read(self, entry: Mapping[str, Any]) -> GraphModule:
        """One graph module with those inside it.

        Raises:
            ArtifactError: it names something that a file may not name.
            KeyError, TypeError, ValueError: it is not what a `GraphWriter` writes.
        """
        gm = GraphModule(nn.Module(), Graph())
        type(gm).__name__ = _identifier(entry["class"])
        # In the order they were in: an optimizer's state goes by the order of parameters.
        for path in entry["order"]:
            if path in entry["modules"]:
                _attach(gm, path, self.modules.get(entry["modules"][path], self.values))
            else:
                inner = entry["graphs"].get(path)
                _attach(gm, path, nn.Module() if inner is None else self.read(inner))
        for path, (number, kind) in entry["tensors"].items():
            self._attach_tensor(gm, path, number, kind)
        # After those of inner graphs, which have nodes of the same names.
        self.values.nodes = {}
        graph = Graph()
        for node in entry["nodes"]:
            self._node(graph, node)
        _set_call(graph, entry["call"])
        graph.lint()
        gm.graph = graph
        gm.training = bool(entry["training"])
        for key, value in entry["meta"].items():
            gm.meta[_own(key)] = self._meta(value, gm)
        return gm

    def _attach_tensor(self, gm: GraphModule, path: str, number: int, kind: str) -> None:
        owner, name = _owner(gm, path)
        tensor = self.values.tensors.get(number)
        if kind in ("parameter", "trained"):
            key = number, kind
            if key not in self._parameters:
                trained = kind == "trained"
                self._parameters[key] = nn.Parameter(tensor, requires_grad=trained)
            owner._parameters[name] = self._parameters[key]  # type: ignore[assignment]
        elif kind in ("buffer", "transient"):
            owner.register_buffer(name, tensor, persistent=kind == "buffer")
        else:
            setattr(owner, name, tensor)

    def _node(self, graph: Graph, entry: Mapping[str, Any]) -> None:
        op, name = entry["op"], _identifier(entry["name"])
        if op not in _OPS or name in self.values.nodes:
            raise ArtifactError(f'a file may not hold a node "{name}" that does "{op}"')
        if op == "placeholder" and (entry["args"] or "kwargs" in entry):
            raise ArtifactError(f'the input "{name}" may not have a default')
        args = _checked(tuple(self.values.read(a) for a in entry["args"]))
        kwargs = _checked(
            {_identifier(k): self.values.read(v) for k, v in entry.get("kwargs", {}).items()}
        )
        node = graph.create_node(op, self._target(entry), args, kwargs, name=name)
        if node.name != name:
            raise ArtifactError(f'"{name}" cannot be the name of a node')
        self.values.nodes[name] = node
        for key, value in entry["meta"].items():
            node.meta[key] = self._node_meta(key, value)

    def _target(self, entry: Mapping[str, Any]) -> Any:
        target = entry["target"]
        if entry["op"] == "call_function":
            return target_of_name(target, self.values.namespaces)
        if entry["op"] in ("placeholder", "output"):
            return _identifier(target)
        return _path(target)

    def _node_meta(self, key: str, value: Any) -> Any:
        if key == Q_ANNOTATION_KEY:
            return self._annotation(value)
        if key in ("nn_module_stack", "source_fn_stack"):
            return _plain(value)
        if key in NODE_META or key.startswith(OWN_PREFIX):
            return self.values.read(value)
        raise ArtifactError(f'a file may not hold "{key}" of a node')

    def _annotation(self, value: Mapping[str, Any]) -> QuantizationAnnotation:
        nodes = self.values.nodes
        inputs: dict[Node, QuantizationSpecBase | None] = {
            nodes[name]: _spec(kind) for name, kind in value["inputs"] if name in nodes
        }
        return QuantizationAnnotation(
            input_qspec_map=inputs,
            output_qspec=_spec(value["output"]),
            _annotated=bool(value["annotated"]),
        )

    def _meta(self, value: Mapping[str, Any], gm: GraphModule) -> Any:
        if "capture" in value:
            return read_capture(value["capture"])
        if "provenance" in value:
            return Provenance.from_json(value["provenance"], read_from(gm))
        return self.values.read(value["value"])


_ARGUMENTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    type(Ellipsis),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    OpOverload,
    Node,
)


def _checked(value: Any) -> Any:
    """Arguments, if each is of a type whose text in torch.fx's code can be nothing but itself."""
    if isinstance(value, (list, tuple)):
        for item in value:
            _checked(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            _checked(key)
            _checked(item)
    elif isinstance(value, slice):
        _checked((value.start, value.stop, value.step))
    elif type(value) not in _ARGUMENTS and not isinstance(value, OpOverload):
        raise ArtifactError(f"a {type(value).__name__} may not be an argument of a node")
    return value


def read_capture(text: str) -> Capture:
    """A Capture of its JSON, if nothing in it is imported by its name.

    Raises:
        ArtifactError: its containers are of classes that torch imports by name.
    """
    refuse_imports(text)
    capture = Capture.from_json(text)
    keywords = capture.in_spec.child(1).context if capture.in_spec.num_children == 2 else []
    for name in [*capture.arg_names, *(keywords or [])]:
        _identifier(name)
    return capture


def _set_call(graph: Graph, call: Mapping[str, Any] | None) -> None:
    if call is None:
        return
    refuse_imports(call["in"] + (call["out"] or ""))
    info = _PyTreeInfo(
        [_identifier(name) for name in call["names"]],
        load_spec(call["in"]),
        None if call["out"] is None else load_spec(call["out"]),
    )
    keywords = info.in_spec.child(1).context if info.in_spec.num_children == 2 else []
    for name in keywords or []:
        _identifier(name)
    graph.set_codegen(_PyTreeCodeGen(info))


def _spec(kind: str | None) -> SavedSpec | None:
    return None if kind is None else SavedSpec(str(kind))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if "map" in value:
            return {str(k): _plain(v) for k, v in value["map"]}
        if "tuple" in value:
            return tuple(_plain(v) for v in value["tuple"])
        return [_plain(v) for v in value["list"]]
    return value


def _identifier(name: object) -> str:
    if not isinstance(name, str) or not is_identifier(name):
        raise ArtifactError(f"{name!r} is no name")
    return name


def _path(path: object) -> str:
    if not isinstance(path, str) or not is_path(path):
        raise ArtifactError(f"{path!r} is no dotted name")
    return path


def _own(key: str) -> str:
    if not key.startswith(OWN_PREFIX):
        raise ArtifactError(f'a file may not hold "{key}" of a graph')
    return key


def _owner(gm: GraphModule, path: str) -> tuple[nn.Module, str]:
    owner, _, name = _path(path).rpartition(".")
    module: Any = gm
    for part in owner.split(".") if owner else ():
        module = module._modules[part]
    if name in _KEPT or hasattr(type(module), name):
        raise ArtifactError(f'a file may not set "{path}"')
    return module, name


def _attach(gm: GraphModule, path: str, module: nn.Module) -> None:
    owner, name = _owner(gm, path)
    owner._modules[name] = module

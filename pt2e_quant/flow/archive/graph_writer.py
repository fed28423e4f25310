"""A graph module as JSON: its nodes, its tables of tensors and modules, its metadata."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from pt2e_quant.core.capture import Capture
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.provenance import Provenance
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.core.tree_specs import dump_spec
from pt2e_quant.flow.archive.allowed import is_identifier, name_of_target, refuse_imports
from pt2e_quant.flow.archive.held_numbers import refer_to
from pt2e_quant.flow.archive.modules import ModuleWriter
from pt2e_quant.flow.archive.values import ValueWriter
from pt2e_quant.graph.meta import ORIGIN_KEY, origin_name

NODE_META = ("val", "stack_trace", "torch_fn", "custom")
"""The metadata kept of nodes, beside the module stack, annotations and our own keys."""

OWN_PREFIX = "pt2e_quant"
"""The prefix of the keys of this package's own metadata."""


class GraphWriter:
    """Writes graph modules.

    Args:
        values: writes arguments and metadata.
        modules: numbers the modules that graphs call.
    """

    def __init__(self, values: ValueWriter, modules: ModuleWriter) -> None:
        self.values = values
        self.modules = modules

    def write(self, gm: GraphModule, prefix: str = "") -> dict[str, Any]:
        """One graph module with those inside it.

        Args:
            gm: the graph module.
            prefix: its dotted path, for the names of tensors.

        Raises:
            UnsupportedError: naming the node or the attribute that a file cannot hold.
        """
        tables = self._tables(gm, prefix)
        for path, module in tables["modules"].items():
            self.modules.name(module, prefix + path)
        return {
            "class": type(gm).__name__ if is_identifier(type(gm).__name__) else "GraphModule",
            "training": gm.training,
            "nodes": [self._node(n) for n in gm.graph.nodes],
            "call": _call(gm),
            "order": tables["order"],
            "tensors": tables["tensors"],
            "modules": {
                p: self.modules.number(m, self.values) for p, m in tables["modules"].items()
            },
            "graphs": {p: self.write(g, f"{prefix}{p}.") for p, g in tables["graphs"].items()},
            "meta": self._meta(gm),
        }

    def _tables(self, gm: GraphModule, prefix: str) -> dict[str, Any]:
        """The attributes by kind: plain modules, tensors, modules of this package, graphs."""
        found: dict[str, Any] = {"order": [], "tensors": {}, "modules": {}, "graphs": {}}
        for path, module in _outside(gm):
            if path:
                found["order"].append(path)
            if path and isinstance(module, GraphModule):
                found["graphs"][path] = module
            elif path and type(module) is not nn.Module:
                found["modules"][path] = module
            else:
                start = f"{path}." if path else ""
                for name, entry in self._tensors(module, prefix + start):
                    found["tensors"][start + name] = entry
        return found

    def _tensors(self, module: nn.Module, start: str) -> Iterator[tuple[str, list[Any]]]:
        """The tensors of one module: [number, kind]."""
        add = self.values.tensors.add
        for name, value in module._parameters.items():
            if value is not None:
                kind = "trained" if value.requires_grad else "parameter"
                yield name, [add(value, start + name), kind]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                is_kept = name not in module._non_persistent_buffers_set
                yield name, [add(buffer, start + name), "buffer" if is_kept else "transient"]
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield name, [add(value, start + name), "attribute"]

    def _node(self, node: Node) -> dict[str, Any]:
        try:
            entry: dict[str, Any] = {
                "name": node.name,
                "op": node.op,
                "target": self._target(node),
                "args": [self.values.write(a) for a in node.args],
            }
            if node.kwargs:
                entry["kwargs"] = {k: self.values.write(v) for k, v in node.kwargs.items()}
            entry["meta"] = self._node_meta(node)
        except UnsupportedError as error:
            raise UnsupportedError(error.what, node=node, fix=error.fix) from error
        return entry

    def _target(self, node: Node) -> str:
        if node.op == "call_function":
            return name_of_target(node.target)
        if node.op == "call_method":
            raise UnsupportedError("a file cannot hold a method call", fix="export the model")
        return str(node.target)

    def _node_meta(self, node: Node) -> dict[str, Any]:
        kept = {
            key: self.values.write(node.meta[key])
            for key in node.meta
            if key in NODE_META or str(key).startswith(OWN_PREFIX)
        }
        for key in ("nn_module_stack", "source_fn_stack"):
            if key in node.meta:
                kept[key] = _plain(node.meta[key])
        if "from_node" in node.meta:  # a chain of torch's own objects, of which the end is used
            kept[ORIGIN_KEY] = origin_name(node)
        annotation = node.meta.get(Q_ANNOTATION_KEY)
        if annotation is not None:
            kept[Q_ANNOTATION_KEY] = _annotation(annotation)
        return kept

    def _meta(self, gm: GraphModule) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in gm.meta.items():
            if not str(key).startswith(OWN_PREFIX):
                continue
            if isinstance(value, Capture):
                found[key] = {"capture": value.to_json()}
            elif isinstance(value, Provenance):
                found[key] = {"provenance": value.to_json(refer_to(gm))}
            else:
                found[key] = {"value": self.values.write(value, key)}
        return found


def _outside(gm: GraphModule) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a graph module, not those inside modules that are written as a whole."""
    stack: list[tuple[str, nn.Module]] = [("", gm)]
    while stack:
        path, module = stack.pop()
        yield path, module
        if path and (isinstance(module, GraphModule) or type(module) is not nn.Module):
            continue
        start = f"{path}." if path else ""
        children = [(start + n, m) for n, m in module._modules.items() if m is not None]
        stack += reversed(children)


def _call(gm: GraphModule) -> dict[str, Any] | None:
    """Return a graph module's call: the names of its parameters, and its pytrees if any."""
    info = getattr(gm.graph._codegen, "pytree_info", None)
    if info is None:
        return None
    given = dump_spec(info.in_spec)
    result = None if info.out_spec is None else dump_spec(info.out_spec)
    refuse_imports(given + (result or ""))
    return {"names": list(info.orig_args), "in": given, "out": result}


def _plain(value: Any) -> Any:
    """A module stack or the like, with classes and functions by their names."""
    if isinstance(value, Mapping):
        return {"map": [[str(k), _plain(v)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list" if isinstance(value, list) else "tuple": [_plain(v) for v in value]}
    if value is None or isinstance(value, (str, int)):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    return str(getattr(value, "__name__", value))


def _annotation(annotation: Any) -> dict[str, Any]:
    """Return the slots that an annotation asks for; their observers are in the graph already."""
    inputs = getattr(annotation, "input_qspec_map", None) or {}
    output = getattr(annotation, "output_qspec", None)
    return {
        "inputs": [[n.name, _kind(spec)] for n, spec in inputs.items()],
        "output": _kind(output),
        "annotated": bool(getattr(annotation, "_annotated", True)),
    }


def _kind(spec: Any) -> str | None:
    return None if spec is None else type(spec).__name__

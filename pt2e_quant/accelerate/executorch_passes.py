"""ExecuTorch's edge passes without the work that changes nothing.

ExecuTorch 1.4 re-interprets the whole graph on fake tensors after nearly each of some 25 passes,
compiles Python code after each that is almost never run, and copies each node's history every
time. Inside `fewer_interpretations` it does these only where they can change something, and
computes no fake tensor again of the same operator and inputs. The file that comes out is the same
byte for byte: `tests/backends/xnnpack/test_patched_lowering.py`.

All that is replaced is private to torch and ExecuTorch. With versions other than those it was
tested with, or where a name is missing, nothing is replaced.
"""

import copy
import operator
import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch.fx.traceback
from executorch.exir.dialects.edge._ops import EdgeOpOverload
from executorch.exir.pass_base import ExportPass, ProxyValue, _ExportPassBase
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassResult

from pt2e_quant.accelerate.patch import Patch, Replacement, replaced

PATCH = Patch(
    name="executorch_passes",
    saves="half to two thirds of the time of lowering to a .pte",
    versions={"torch": "2.13", "executorch": "1.4"},
)

_FREE = frozenset(
    {"call", "requires", "ensures", "should_preserve_symbolic_input_metadata", "_abc_impl"}
)
"""Attributes of a pass that do not take part in the re-interpretation."""

_SEEN = "pt2e_quant.value_of"
"""Key of `node.meta` with the signature of the node that its value was computed for."""

_NODE = "_pt2e_quant_node"
"""Attribute of a pass with the node that it interprets."""


def fewer_interpretations() -> AbstractContextManager[None]:
    """Replace the wasteful parts while the block runs; a second thread waits."""
    return replaced(PATCH, _wasteful)


def _wasteful() -> list[Replacement]:
    interpreter = _ExportPassBase.ExportInterpreter
    history = types.SimpleNamespace(deepcopy=lambda value: value, copy=copy.copy)
    return [
        (_ExportPassBase, "call", _call_once(_ExportPassBase.call)),
        (_ExportPassBase, "_fx", _with_known_value(_ExportPassBase._fx)),
        (interpreter, "run_node", _telling_node(interpreter.run_node)),
        (GraphModule, "recompile", _recompile_later(GraphModule.recompile)),
        (GraphModule, "code", property(_code_now(GraphModule.__dict__["code"]))),
        (GraphModule, "print_readable", lambda *args, **kwargs: ""),
        (torch.fx.traceback, "copy", history),
    ]


_Call = Callable[[Any, GraphModule], PassResult]


def _call_once(original: _Call) -> _Call:
    """Re-interpretation only for passes that take part in it, or where a value is missing."""

    def call(self: Any, graph_module: GraphModule) -> PassResult:
        if not _takes_part(type(self)) and _refresh(graph_module):
            return PassResult(graph_module, True)
        result = original(self, graph_module)
        for node in result.graph_module.graph.nodes:
            node.meta[_SEEN] = _signature(node)
        return result

    return call


def _telling_node(original: Callable[[Any, Node], Any]) -> Callable[[Any, Node], Any]:
    def run_node(self: Any, node: Node) -> Any:
        self.callback.__dict__[_NODE] = node
        return original(self, node)

    return run_node


@dataclass(frozen=True, slots=True)
class _Known:
    """Stands for the interpreter of a call whose value is known."""

    value: Any

    def call_function(self, *_: Any) -> Any:
        return self.value


def _with_known_value(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a pass writes into the new graph has the value of its node, if it is the same call."""

    def _fx(self: Any, kind: str, target: Any, args: Any, kwargs: Any, meta: Any) -> Any:
        node = self.__dict__.get(_NODE)
        if kind != "call_function" or not _is_same_call(node, target, (args, kwargs)):
            return original(self, kind, target, args, kwargs, meta)
        interpreter, self.interpreter = self.interpreter, _Known(node.meta["val"])
        try:
            return original(self, kind, target, args, kwargs, meta)
        finally:
            self.interpreter = interpreter

    return _fx


def _is_same_call(node: Node | None, target: Any, given: tuple[Any, Any]) -> bool:
    """True if a call is that of a node, on the values that the node's own was computed of."""
    # An edge operator computes what the operator does that it stands for.
    if node is None or node.target not in (target, getattr(target, "_op", None)):
        return False
    # A pass may have given the node, or an input, another value since.
    sources = (n for n in node.all_input_nodes if n.op != "get_attr")
    is_known = _has_value(node) and all(map(_has_value, sources))
    return is_known and _is_same(given, (node.args, node.kwargs))


def _is_same(given: Any, wanted: Any) -> bool:
    if isinstance(wanted, Node) and wanted.op == "get_attr":
        return getattr(wanted.graph.owning_module, str(wanted.target), None) is given
    if isinstance(wanted, Node):
        return isinstance(given, ProxyValue) and _is_alike(given.data, wanted.meta.get("val"))
    if isinstance(wanted, (list, tuple)):
        if not isinstance(given, (list, tuple)) or len(given) != len(wanted):
            return False
        return all(map(_is_same, given, wanted))
    if isinstance(wanted, dict):
        if not isinstance(given, dict) or list(given) != list(wanted):
            return False
        return all(map(_is_same, given.values(), wanted.values()))
    return type(given) is type(wanted) and given == wanted


def _is_alike(value: Any, other: Any) -> bool:
    """True for fake tensors, or lists of them, that differ in nothing that an operator can see."""
    if value is other:
        return value is not None
    if isinstance(value, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(value) == len(other) and all(map(_is_alike, value, other))
    if not isinstance(value, FakeTensor) or not isinstance(other, FakeTensor):
        # A pass is given the numbers of an input that has them.
        return isinstance(other, FakeTensor) and value is not None and value is other.constant
    is_one = value.fake_mode is other.fake_mode and value.constant is other.constant
    return is_one and _form(value) == _form(other)


def _form(value: FakeTensor) -> tuple[Any, ...]:
    numbers = (*value.shape, *value.stride(), value.storage_offset())
    # Comparing sizes of run time would make guards: their expressions are compared.
    known = [n.node.expr if isinstance(n, torch.SymInt) else n for n in numbers]
    return value.dtype, value.device, value.requires_grad, value.dim(), known


def _signature(node: Node) -> str:
    """A key of what a node's value depends on; it differs for meta of another node.

    The sizes of the value are in it: a pass may give a constant another shape.
    """
    value = node.meta.get("val")
    sizes = [n if isinstance(n, int) else "" for n in getattr(value, "shape", ())]
    return f"{node.name}: {node.target}{node.args}{node.kwargs}{sizes}"


def _takes_part(kind: type) -> bool:
    names = (n for n in dir(ExportPass) if not n.startswith("__") and n not in _FREE)
    return any(getattr(kind, n, None) is not getattr(ExportPass, n) for n in names)


def _refresh(gm: GraphModule) -> bool:
    """Compute values that are missing or out of date, and those after them.

    Returns False, having changed nothing that matters, if this needs a re-interpretation.
    """
    mode = _fake_mode(gm)
    if mode is None:
        return False
    fresh: set[Node] = set()
    for node in gm.graph.nodes:
        if node.op == "output":
            continue
        if node.op == "placeholder" and not _has_value(node):
            return False  # a pass gave a constant another shape
        if _has_value(node) and not any(n in fresh for n in node.all_input_nodes):
            continue
        if not fresh and not any(_SEEN in n.meta for n in gm.graph.nodes):
            return False
        if node.op != "call_function" or not _can_compute(node):
            return False
        _compute(node, mode)
        node.meta[_SEEN] = _signature(node)
        fresh.add(node)
    return True


def _fake_mode(gm: GraphModule) -> FakeTensorMode | None:
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, FakeTensor):
            return value.fake_mode
    return None


def _has_value(node: Node) -> bool:
    if "val" not in node.meta or node.meta.get(_SEEN) != _signature(node):
        return False
    value = node.meta["val"]
    return not isinstance(value, Tensor) or isinstance(value, FakeTensor)


def _can_compute(node: Node) -> bool:
    if node.target is operator.getitem:
        return True
    if not isinstance(node.target, (EdgeOpOverload, OpOverload)):
        return False
    return all("val" in n.meta for n in node.all_input_nodes)


def _compute(node: Node, mode: FakeTensorMode) -> None:
    args: Any = map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = map_arg(node.kwargs, lambda n: n.meta["val"])
    target: Any = node.target
    mode.allow_non_fake_inputs = True
    with mode, enable_python_dispatcher():
        node.meta["val"] = target(*args, **kwargs)
    node.meta["tensor_meta"] = None


def _recompile_later(original: Callable[[GraphModule], Any]) -> Callable[[GraphModule], Any]:
    """Code is generated when the module is first called, not after each edit."""

    def recompile(self: GraphModule) -> None:
        codegen = self._graph._codegen
        info = getattr(codegen, "pytree_info", None)
        if info is not None:
            self._in_spec, self._out_spec = info.in_spec, info.out_spec

        def forward(module: GraphModule, *args: Any, **kwargs: Any) -> Any:
            original(module)
            return module.forward(*args, **kwargs)

        self._code = ""  # generated when asked for; text, because logging prints it
        type(self).forward = forward

    return recompile


def _code_now(original: property) -> Callable[[GraphModule], str]:
    def code(self: GraphModule) -> str:
        if not self.__dict__.get("_code"):
            return str(self._graph.python_code(root_module="self").src)
        getter: Any = original.fget
        return str(getter(self))

    return code

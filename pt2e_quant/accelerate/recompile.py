"""Recompile an edited graph module: torch.fx's own code, written in a quarter of its time.

torch.fx asks each argument of each node what it is in nine ways, and each node for its name in a
namespace. A captured graph has few kinds of argument and unique names, so that its code can be
written straight away. What comes out is the same character for character, which
`tests/accelerate/test_recompile.py` holds; whatever else a graph may have, torch.fx writes itself.
"""

import builtins
import keyword
import operator
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as settings
from torch.fx.graph import CodeGen, PythonCode

from pt2e_quant.accelerate.patch import Patch

PATCH = Patch(
    name="recompile",
    saves="three quarters of the time in which torch.fx writes the code of a graph",
    versions={"torch": "2.13"},
)

_PRINTED = frozenset(
    {
        bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.layout,
        torch.memory_format,
    }
)  # fmt: skip
"""Types of arguments that the code shows by their `repr`."""

_TAKEN = frozenset({*keyword.kwlist, *vars(builtins)})


class _Unusual(Exception):
    """The graph holds something that torch.fx is left to write."""


def recompile(gm: GraphModule) -> None:
    """`gm.recompile()`, faster where the graph is a plain one."""
    graph = gm.graph

    def python_code(root_module: str, **options: Any) -> PythonCode:
        made = None
        if root_module == "self" and not any(options.values()):
            made = write_code(graph)
        return made or type(graph).python_code(graph, root_module, **options)

    vars(graph)["python_code"] = python_code
    try:
        gm.recompile()
    finally:
        del vars(graph)["python_code"]


def write_code(graph: Graph) -> PythonCode | None:
    """The code that `graph.python_code("self")` gives, None if only torch.fx can write it."""
    codegen = graph._codegen
    is_plain = codegen._body_transformer is None and not codegen.additional_globals()
    shows_more = settings.enrich_profiler_metadata or "FX_GRAPH_SHOW_META" in os.environ
    if not PATCH.is_on() or not is_plain or shows_more:
        return None
    try:
        return _Writer(graph).write(codegen)
    except _Unusual:
        return None


class _Writer:
    """Writes one graph."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = list(graph.nodes)
        self.globals = _globals()
        names = {node.name for node in self.nodes}
        if len(names) < len(self.nodes) or names & (_TAKEN | self.globals.keys()):
            raise _Unusual
        self.dying = _last_uses(self.nodes)
        self.free: list[str] = []
        self.lines: list[str] = []
        self.line_nodes: list[int] = []

    def write(self, codegen: CodeGen) -> PythonCode:
        """The whole function, with what torch.fx keeps beside it."""
        for at, node in enumerate(self.nodes):
            line = self._line(node, codegen)
            if line is not None:
                self.lines.append(line)
                self.line_nodes.append(at)
        self.lines.append("")
        self.line_nodes.append(len(self.nodes) - 1)
        prologue = codegen.gen_fn_def(self.free, "")
        first = prologue.count("\n") + 1
        code = "\n".join(self.lines).lstrip("\n").replace("\n", "\n    ")
        return PythonCode(
            f"\n\n\n{prologue}\n    {code}",
            dict(self.globals),
            _lineno_map=dict(enumerate(self.line_nodes, first)),
            _prologue_start=4,
        )

    def _line(self, node: Node, codegen: CodeGen) -> str | None:
        """The line of a node, None for an input that has its own name."""
        name = node.name
        if node.type is not None or not name.isidentifier() or "is_wrapped" in node.meta:
            raise _Unusual
        match node.op:
            case "placeholder":
                return self._placeholder(node)
            case "output":
                return codegen.generate_output(node.args[0], repr_fn=_shown)
            case "call_function":
                value = _call(node)
            case "get_attr":
                value = _dotted(str(node.target))
            case "call_module":
                value = f"{_dotted(str(node.target))}({_arguments(node)})"
            case _:
                raise _Unusual
        dying = self.dying.get(node, [])
        gone = dying if node.users else [*dying, node.name]
        return f"{name} = {value}" + (f";  {' = '.join(gone)} = None" if gone else "")

    def _placeholder(self, node: Node) -> str | None:
        target = str(node.target)
        if node.args or "*" in target:
            raise _Unusual
        self.free.append(target)
        return None if target == node.name else f"{node.name} = {target}"


def _last_uses(nodes: list[Node]) -> dict[Node, list[str]]:
    """The names that each node is the last to read, in the order of its inputs."""
    seen: set[Node] = set()
    found: dict[Node, list[str]] = {}
    for node in reversed(nodes):
        for source in node._input_nodes:
            if source not in seen:
                seen.add(source)
                found.setdefault(node, []).append(source.name)
    return found


def _call(node: Node) -> str:
    target = node.target
    if type(target) is OpOverload:
        return f"{_qualified(target)}({_arguments(node)})"
    if target is operator.getitem and len(node.args) == 2:
        return f"{_shown(node.args[0])}[{_shown(node.args[1])}]"
    raise _Unusual


@cache
def _qualified(target: OpOverload) -> str:
    return f"torch.ops.{target}"


def _arguments(node: Node) -> str:
    shown = [_shown(value) for value in node.args]
    if node.kwargs:
        shown += [f"{name} = {_shown(value)}" for name, value in node.kwargs.items()]
    return ", ".join(shown)


def _shown(value: Any) -> str:
    if isinstance(value, Node):
        return value.name
    if type(value) in _PRINTED:
        return repr(value)
    if isinstance(value, list):
        return f"[{_listed(value)}]"
    if type(value) is tuple:
        return f"({_listed(value)},)" if len(value) == 1 else f"({_listed(value)})"
    raise _Unusual


def _listed(values: Iterable[Any]) -> str:
    return ", ".join([_shown(value) for value in values])


@cache
def _globals() -> dict[str, Any]:
    """Names that the code of every graph may use."""
    return dict(Graph().python_code("self").globals)


def _dotted(target: str) -> str:
    """An attribute of the module, also where its name is no identifier."""
    found = "self"
    for part in target.split("."):
        found = f"{found}.{part}" if part.isidentifier() else f'getattr({found}, "{part}")'
    return found

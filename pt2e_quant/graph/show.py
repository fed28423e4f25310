"""A graph as stable text: for tests, errors and people.

The text depends on what the graph computes and in which order, not on node names, symbol names
or how arguments are passed. One line a node:

    x: f32[s0, 3, 8, 8] = input
    conv2d: f32[s0, 4, 6, 6] = conv2d(x, conv.weight, bias=conv.bias)
    return conv2d
"""

import re
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.graph.alias import subgraph_of
from pt2e_quant.graph.ops import parameters

_SHORT = {
    "float64": "f64",
    "float32": "f32",
    "float16": "f16",
    "bfloat16": "bf16",
    "int64": "i64",
    "int32": "i32",
    "int16": "i16",
    "int8": "i8",
    "uint8": "u8",
    "uint16": "u16",
    "bool": "bool",
}
_SYMBOL = re.compile(r"\b[su]\d+\b(?!\[)")  # but not the dtype of "u8[4]"


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def show_type(value: object) -> str:
    """A value's dtype and shape: "f32[2, 3]"; "int" and the like for symbols; "" if unknown."""
    if isinstance(value, Tensor):
        return f"{_dtype(value.dtype)}[{', '.join(str(s) for s in value.shape)}]"
    if isinstance(value, (list, tuple)):
        return "(" + ", ".join(show_type(v) for v in value) + ")"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return f"{type(value).__name__.removeprefix('Sym').lower()} {value}"
    return ""


class _Names:
    """Names by operator and order of appearance, so that renaming a node changes nothing."""

    def __init__(self) -> None:
        self.of: dict[Node, str] = {}
        self._next: dict[str, int] = {}
        self._taken: set[str] = set()
        self._symbols: dict[str, str] = {}

    def add(self, node: Node, base: str) -> str:
        count = self._next.get(base, 0)
        name = base if count == 0 else f"{base}_{count}"
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._next[base] = count + 1
        self._taken.add(name)
        self.of[node] = name
        return name

    def symbols(self, text: str) -> str:
        """Symbols of shapes renumbered in order of appearance."""

        def renamed(found: re.Match[str]) -> str:
            name = found[0]
            return self._symbols.setdefault(name, f"{name[0]}{len(self._symbols)}")

        return _SYMBOL.sub(renamed, text)


def _operator(node: Node) -> str:
    target = node.target
    if isinstance(target, OpOverload):
        namespace, name = target._schema.name.split("::")
        return name if namespace == "aten" else f"{namespace}.{name}"
    if isinstance(target, HigherOrderOperator):
        return str(target.__name__)
    return getattr(target, "__name__", str(target))


def _literal(value: Any, names: _Names) -> str:
    if isinstance(value, Node):
        return names.of.get(value, value.name)
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_literal(v, names) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, torch.dtype):
        return _dtype(value)
    if isinstance(value, float):
        return f"{value:.6g}" if value != int_or_none(value) else f"{value:.1f}"
    return str(value)


def int_or_none(value: float) -> int | None:
    """The integer that a float equals, None for a fraction, a large or a non-finite value.

    >>> int_or_none(6.0), int_or_none(0.5), int_or_none(float("inf"))
    (6, None, None)
    """
    return int(value) if abs(value) < 1e6 and value == int(value) else None


def _arguments(node: Node, names: _Names) -> str:
    parts: list[str] = []
    if isinstance(node.target, OpOverload):
        for i, p in enumerate(parameters(node.target)):
            given = i < len(node.args) or p.name in node.kwargs
            if not given:
                continue
            value = node.args[i] if i < len(node.args) else node.kwargs[p.name]
            if p.required and not p.kwarg_only:
                parts.append(_literal(value, names))
            elif isinstance(value, Node) or value != p.default:
                parts.append(f"{p.name}={_literal(value, names)}")
    else:
        parts += [_literal(a, names) for a in node.args]
        parts += [f"{k}={_literal(v, names)}" for k, v in node.kwargs.items()]
    return ", ".join(parts)


def _line(node: Node, names: _Names) -> str | None:
    if node.op == "get_attr":
        names.of[node] = str(node.target)
        return None
    if node.op == "output":
        return f"return {_literal(node.args[0], names)}"
    kind = names.symbols(show_type(node.meta.get("val")))
    if node.op == "placeholder":
        names.add(node, str(node.target))
        right = "input"
    elif node.op == "call_function":
        operator = _operator(node)
        right = f"{operator}({_arguments(node, names)})"
        names.add(node, operator.rsplit(".", 1)[-1])
    else:
        right = f"{node.op} {node.target}({_arguments(node, names)})"
        names.of[node] = str(node.target)
    return f"{names.of[node]}: {kind} = {right}" if kind else f"{names.of[node]} = {right}"


def show(gm: GraphModule) -> str:
    """The graph as text, the bodies of its regions indented below it."""
    names = _Names()
    lines: list[str] = []
    bodies: list[tuple[str, GraphModule]] = []
    for node in gm.graph.nodes:
        line = _line(node, names)
        if line is not None:
            lines.append(line)
        body = subgraph_of(node)
        if body is not None:
            bodies.append((str(node.target), body))
    for name, body in bodies:
        lines.append(f"{name}:")
        lines += [f"    {line}" for line in show(body).splitlines()]
    return "\n".join(lines) + "\n"

"""A graph as a digest: of operators, arguments, constants and data flow; names do not count.

Each node is hashed from its operator and the hashes of what it reads, and the graph from all of
its nodes' hashes, sorted. So neither names nor the order of independent nodes change it; a node
that is made twice does.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

__all__ = ["digest_graph", "digest_tensor", "digest_texts"]


def digest_texts(texts: Iterable[str]) -> str:
    """16 hexadecimal digits."""
    whole = hashlib.sha256()
    for text in texts:
        whole.update(text.encode())
        whole.update(b"\0")
    return whole.hexdigest()[:16]


def digest_tensor(value: Tensor) -> str:
    """Of dtype, shape and every bit; layout does not count."""
    flat = value.detach().contiguous().reshape(-1)
    data = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
    return f"{_type_of(value)} {hashlib.sha256(data).hexdigest()[:16]}"


def digest_graph(gm: GraphModule, *, values: bool = True) -> str:
    """The digest of a graph.

    Args:
        values: hash constants' values, and float and zero-point arguments. Without them the digest
            depends on the graph's form alone, which is the same on every machine.
    """
    return _Graph(gm, values).digest()


class _Graph:
    def __init__(self, gm: GraphModule, values: bool) -> None:
        self.gm = gm
        self.values = values
        self.of: dict[Node, str] = {}
        self.writes = 0

    def digest(self) -> str:
        inputs = 0
        for node in self.gm.graph.nodes:
            if node.op == "placeholder":
                self.of[node] = f"input {inputs} {_type_of(node.meta.get('val'))}"
                inputs += 1
            elif node.op == "get_attr":
                self.of[node] = self._constant(node)
            else:
                self.of[node] = self._call(node)
        # A constant that several nodes share is counted once: one get_attr or many are the same.
        calls = [h for n, h in self.of.items() if n.op not in ("placeholder", "get_attr")]
        return digest_texts(sorted(calls))

    def _constant(self, node: Node) -> str:
        value: Any = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, GraphModule):
            return digest_graph(value, values=self.values)
        if isinstance(value, Tensor):
            return digest_tensor(value) if self.values else _type_of(value)
        return type(value).__name__

    def _call(self, node: Node) -> str:
        target = node.target
        if not isinstance(target, OpOverload):
            name = getattr(target, "__name__", str(target)) if node.op != "output" else "output"
            parts = [self._argument(a) for a in node.args]
            parts += [f"{k}={self._argument(v)}" for k, v in sorted(node.kwargs.items())]
            return digest_texts([node.op, name, *parts])
        parts = [str(target)]
        for at, argument in enumerate(target._schema.arguments):
            value = node.args[at] if at < len(node.args) else node.kwargs.get(argument.name)
            given = at < len(node.args) or argument.name in node.kwargs
            if given and (isinstance(value, Node) or value != argument.default_value):
                is_free = not self.values and argument.name == "zero_point"
                parts.append(f"{argument.name}={'' if is_free else self._argument(value)}")
        if target._schema.is_mutable:
            self.writes += 1
            parts.append(f"write {self.writes}")
        return digest_texts(parts)

    def _argument(self, value: Any) -> str:
        if isinstance(value, Node):
            return self.of[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(v) for v in value)}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k}: {self._argument(v)}' for k, v in value.items())}}}"
        if isinstance(value, slice):
            return f"slice {self._argument((value.start, value.stop, value.step))}"
        if isinstance(value, float):
            return repr(value) if self.values else "float"
        return str(value)


def _type_of(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    sizes = ", ".join(str(s) if isinstance(s, int) else "s" for s in value.shape)
    return f"{str(value.dtype).removeprefix('torch.')}[{sizes}]"

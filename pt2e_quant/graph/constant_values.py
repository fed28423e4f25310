"""The values of a graph that depend on its constants alone, each computed once."""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.alias import mutated_roots, roots, subgraph_of
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import is_getitem


class ConstantValues:
    """Expressions of parameters, buffers and numbers.

    Args:
        gm: not edited while this is in use, but as `put` says.
        through_qdq: quantized and dequantized constants are constants too.

    Attributes:
        nodes: those that depend only on constants, and whose storage nothing writes.
    """

    def __init__(self, gm: GraphModule, *, through_qdq: bool = False) -> None:
        self.gm = gm
        self.nodes = _of_constants(gm, through_qdq=through_qdq)
        self._values: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of one of `nodes`, which may share storage with the module's own tensor."""
        if node not in self._values:
            if node.op == "get_attr":
                self._values[node] = attribute(self.gm, str(node.target)).detach()
            else:
                target: Any = node.target
                args = map_arg(node.args, self.value)
                kwargs = map_arg(node.kwargs, self.value)
                with torch.no_grad():
                    self._values[node] = target(*args, **kwargs)
        return self._values[node]

    def put(self, node: Node, value: Any) -> None:
        """Say which value a constant has that was added or has changed."""
        self._values[node] = value


def _of_constants(gm: GraphModule, *, through_qdq: bool) -> set[Node]:
    root, written = roots(gm.graph), mutated_roots(gm.graph)
    found: set[Node] = set()
    for node in gm.graph.nodes:
        if root[node] in written:
            continue
        if node.op == "get_attr":
            if subgraph_of(node) is None and "val" in node.meta:
                found.add(node)
        elif node.op == "call_function" and _is_pure(node) and (through_qdq or not is_qdq(node)):
            inputs = node.all_input_nodes
            made = all(n in found for n in inputs) if inputs else _makes_constant(node)
            if made and _has_static_value(node):
                found.add(node)
    return found


def _is_pure(node: Node) -> bool:
    target = node.target
    if is_getitem(node):
        return True
    if not isinstance(target, OpOverload):
        return False
    return not target._schema.is_mutable and torch.Tag.nondeterministic_seeded not in target.tags


def _makes_constant(node: Node) -> bool:
    """True if a call makes its result from numbers only: a range, a window, an identity matrix.

    Not `aten.empty`, whose values are undefined, nor operators of other libraries, which may read
    other state.
    """
    if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
        return False
    return not node.target._opname.startswith("empty")


def _has_static_value(node: Node) -> bool:
    value = node.meta.get("val")
    items = value if isinstance(value, (list, tuple)) else (value,)
    return all(isinstance(v, Tensor) and all(map(_is_literal, v.shape)) for v in items)


def _is_literal(value: object) -> bool:
    return not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))

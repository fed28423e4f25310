"""The values of a graph that depend on its constants alone, each computed once."""

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.alias import roots, subgraph_of, writers
from pt2e_quant.graph.meta import attribute
from pt2e_quant.graph.ops import FILLS_LIKE, Overloads, aten, is_call, is_getitem

_LIKE: Overloads = (aten.zeros_like.default, aten.ones_like.default, aten.full_like.default)
"""Of `FILLS_LIKE`, those whose result has the strides of the other tensor too."""


class ConstantValues:
    """Expressions of parameters, buffers and numbers.

    A tensor that the graph makes and writes constants into, as Swin makes its masks, is one behind
    the last write.

    Args:
        gm: not edited while this is in use, but as `put` says.
        through_qdq: quantized and dequantized constants are constants too.

    Attributes:
        nodes: those that depend only on constants, and whose storage nothing writes later.
        written: of each tensor that the graph makes and writes, the nodes that share its storage up
            to the last write, in order.
    """

    def __init__(self, gm: GraphModule, *, through_qdq: bool = False) -> None:
        self.gm = gm
        self.written: dict[Node, list[Node]] = {}
        self._root = roots(gm.graph)
        self.nodes = self._of_constants(through_qdq=through_qdq)
        self._values: dict[Node, Any] = {}

    def value(self, node: Node) -> Any:
        """The value of one of `nodes`, which may share storage with the module's own tensor."""
        if node not in self._values:
            # A write returns what it writes: later ones see it through the storage.
            for step in self.written.get(self._root.get(node, node), ()):
                self._values[step] = self._computed(step)
            if node not in self._values:
                self._values[node] = self._computed(node)
        return self._values[node]

    def has_own_value(self, node: Node) -> bool:
        """True for a value that the operator and the values of its inputs do not tell."""
        return self._root.get(node) in self.written or is_call(node, FILLS_LIKE)

    def is_plain_fill(self, node: Node) -> bool:
        """True for one number repeated in the shape of another tensor: smaller as it is."""
        return is_call(node, FILLS_LIKE) and node not in self.written

    def inputs(self, node: Node) -> list[Node]:
        """The nodes whose values a node is computed of."""
        return [] if is_call(node, FILLS_LIKE) else node.all_input_nodes

    def _computed(self, node: Node) -> Any:
        if node.op == "get_attr":
            return attribute(self.gm, str(node.target)).detach()
        target: Any = node.target
        if is_call(node, FILLS_LIKE):
            like, rest = node.args[0].meta["val"], node.args[1:]  # type: ignore[union-attr]
            given = torch.empty((), dtype=like.dtype, device=like.device)
            given = given.expand(like.shape) if is_call(node, _LIKE) else given
            return target(given, *rest, **node.kwargs)
        args = map_arg(node.args, self.value)
        kwargs = map_arg(node.kwargs, self.value)
        with torch.no_grad():
            return target(*args, **kwargs)

    def put(self, node: Node, value: Any) -> None:
        """Say which value a constant has that was added or has changed."""
        self._values[node] = value

    def _of_constants(self, *, through_qdq: bool) -> set[Node]:
        root, found = self._root, set[Node]()
        last = {owner: node for node, owner in writers(self.gm.graph)}
        growing = {owner: dict[Node, None]() for owner in last if owner.op == "call_function"}
        for node in self.gm.graph.nodes:
            owner = root[node]
            own = growing.get(owner, {})
            if owner not in last or owner in self.written:
                if _is_constant(node, (found,), through_qdq=through_qdq):
                    found.add(node)
            elif _is_constant(node, (found, own), through_qdq=through_qdq, writes=True):
                own[node] = None
                if node is last[owner] and owner in growing:
                    self.written[owner] = list(own)
                    found.update(own)
            # Who else reads it now sees what is not written to the end yet.
            touched = {root[n] for n in node.all_input_nodes if growing}
            for other in touched - self.written.keys():
                if other is not owner or node not in own:
                    growing.pop(other, None)
        return found


def _is_constant(
    node: Node, known: Sequence[Container[Node]], *, through_qdq: bool, writes: bool = False
) -> bool:
    """True if a node depends on constants alone.

    Args:
        node: any.
        known: where the constants in front of it are.
        through_qdq: quantized and dequantized constants are constants too.
        writes: whether it may write what it reads.
    """
    if node.op == "get_attr":
        return subgraph_of(node) is None and "val" in node.meta
    if node.op != "call_function" or not _is_pure(node, writes=writes):
        return False
    if is_qdq(node) and not through_qdq:
        return False
    inputs = node.all_input_nodes
    if is_call(node, FILLS_LIKE):
        is_made = len(inputs) == 1
    else:
        is_made = all(any(n in part for part in known) for n in inputs)
        is_made = is_made if inputs else _makes_constant(node)
    return is_made and _has_static_value(node)


def _is_pure(node: Node, *, writes: bool) -> bool:
    target = node.target
    if is_getitem(node):
        return True
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return writes or not target._schema.is_mutable


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

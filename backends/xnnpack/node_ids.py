"""The places where Model Explorer shows the nodes of a program in its `.pte`.

The adapter for such files (`pte-adapter-model-explorer`, read at 0.2.0) shows no names: a method is
a graph of instructions, numbered by chain and place, and the payload of each delegate is a graph of
operators, numbered in order. ExecuTorch gives both the debug handle of the node that they were
lowered from.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.fx import GraphModule, Node

from pt2e_quant.backends.artifact import ShownNode
from pt2e_quant.backends.xnnpack.contents import (
    DATA_MOVEMENT,
    DelegateOp,
    ProgramContents,
    read_payload,
)
from pt2e_quant.core.qdq import is_qdq
from pt2e_quant.graph.meta import origin_name
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, MATMUL, Overloads, is_call

_METHOD = "forward"
_KEY = "debug_handle"
_QUANTIZES = "::quantize"
_PRODUCTS: Overloads = (*LINEAR, *CONV, *CONV_TRANSPOSE, *MATMUL)
_CLAMPING = ("aten::relu", "aten::hardtanh", "aten::clamp")
"""Operators that the delegate fuses into the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handles:
    """The nodes that the debug handles of a program stand for.

    Args:
        nodes: the name of the float program's node, by handle.
        clamped: of a clamp the handle of what it reads, by its own.
        kernels: the handle of each kernel call, by chain and place.
    """

    nodes: Mapping[int, str]
    clamped: Mapping[int, int]
    kernels: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def emitted(self, instructions: Mapping[int, Any]) -> "Handles":
        """With the places of kernel calls, from the debug handles of a method's instructions.

        Those of a delegate's call are a list.
        """
        found = {(0, at): handle for at, handle in instructions.items() if isinstance(handle, int)}
        return replace(self, kernels=found)

    def floats(
        self, gm: GraphModule, operators: Iterable[DelegateOp], kernels: Iterable[int]
    ) -> frozenset[str]:
        """The operators of a graph that a program computes in float, or outside of its delegates.

        Args:
            gm: the graph that was lowered.
            operators: of the program's delegates.
            kernels: the handles of what it calls besides.
        """
        computed = [op for op in operators if op.name not in DATA_MOVEMENT]
        floats = {op.handle for op in computed if not op.multiplies_integers} | {*kernels}
        products = {op.handle for op in computed if op.multiplies_integers and op.is_product}
        found = {name for handle, name in self.nodes.items() if handle in floats}
        # What a pass puts behind a product, a factor for each channel, has the product's handle.
        multiplied = {name for handle, name in self.nodes.items() if handle in products}
        return frozenset(
            node.name
            for node in gm.graph.nodes
            if node.op == "call_function"
            and not is_qdq(node)
            and (origin := origin_name(node)) in found
            and not (origin in multiplied and is_call(node, _PRODUCTS))
        )


def read_handles(program: Any, inputs: Sequence[str]) -> Handles:
    """The handles of an edge program and of its delegates, before it is emitted.

    Args:
        program: of torch.export, with delegates in it.
        inputs: the names of its inputs in the float program.
    """
    names: dict[int, str] = {}
    clamped: dict[int, int] = {}
    given = dict(zip(program.graph_signature.user_inputs, inputs, strict=False))
    for node in _operators(program.graph_module):
        handle = node.meta.get(_KEY)
        if handle is None:
            continue
        source = node.args[0] if node.args else None
        if isinstance(source, Node) and source.name in given and _QUANTIZES in _name(node):
            names.setdefault(handle, given[source.name])
        names.setdefault(handle, origin_name(node))
        if _name(node) in _CLAMPING and isinstance(source, Node):
            clamped.setdefault(handle, source.meta.get(_KEY, handle))
    return Handles(nodes=names, clamped=clamped)


def floats_of(program: Any, handles: Handles, gm: GraphModule) -> frozenset[str]:
    """`Handles.floats` of an edge program, before it is emitted."""
    held = [module for _, module in program.graph_module.named_modules()]
    payloads = [bytes(m.processed_bytes) for m in held if hasattr(m, "processed_bytes")]
    called = [
        node.meta[_KEY]
        for node in program.graph.nodes
        if node.op == "call_function" and _KEY in node.meta and "::" in _name(node)
    ]
    return handles.floats(gm, [op for payload in payloads for op in read_payload(payload)], called)


def _operators(gm: Any) -> list[Node]:
    """The operators of a graph, those inside of delegates in the places of their calls."""
    found: list[Node] = []
    for node in gm.graph.nodes:
        held = getattr(gm, str(node.target), None) if node.op == "get_attr" else None
        inside = getattr(held, "original_module", None)
        if inside is not None:
            found += _operators(inside.graph_module)
        elif node.op == "call_function":
            found.append(node)
    return found


def _name(node: Node) -> str:
    named = getattr(node.target, "name", None)
    return str(named()).rpartition(".")[0] or str(named()) if callable(named) else ""


def node_ids(contents: ProgramContents, handles: Handles, file: str) -> dict[str, ShownNode]:
    """Return the place where the value of each node is made, by the node's name.

    Args:
        contents: of the file.
        handles: of its program.
        file: the name of the file, which the graphs of delegates are named by.
    """
    kernels = {
        handle: ShownNode(graph=_METHOD, node=f"{_METHOD}_{chain}_{at}")
        for (chain, at), handle in handles.kernels.items()
    }
    inside = [
        (operator, ShownNode(graph=f"{file}::{_METHOD}_{chain}_{at}", node=str(number)))
        for (chain, at), operators in zip(contents.places, contents.delegates, strict=True)
        for number, operator in enumerate(operators)
    ]
    # The last of several operators has the node's value; conversions of it have its handle too.
    computed = {op.handle: place for op, place in inside if op.name not in DATA_MOVEMENT}
    moved = {op.handle: place for op, place in inside if op.name in DATA_MOVEMENT}
    places = moved | computed | kernels
    found: dict[str, ShownNode] = {}
    for handle, name in handles.nodes.items():
        made = places.get(handle) or places.get(handles.clamped.get(handle, handle))
        if made is not None:
            found[name] = made
    return found

"""Lower again with one operator left in float, where a lowering was refused for it."""

from collections import deque
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import TypeVar

from torch.fx import GraphModule, Node

from pt2e_quant.backends.target.leave_slower import CLIPS
from pt2e_quant.core.errors import ArtifactError, Pt2eQuantError, UnsupportedError
from pt2e_quant.core.qdq import is_dequantize, is_qdq, is_quantize
from pt2e_quant.flow.report.report import FloatRegion
from pt2e_quant.graph.ops import is_call
from pt2e_quant.graph.subgraphs import copy_graph

T = TypeVar("T")

_KEY = "pt2e_quant_fallback"
"""The key in `meta["custom"]`, which passes, exports and ExecuTorch's decompositions copy."""

_MOST = 4
"""So many times a graph is lowered again at most."""


class Fallback(IntEnum):
    """The fallback of an operator that is refused in integers; its q/dq stay, and its values."""

    NONE = 0
    FLOAT = 1
    """In float, by the operator of the backend."""
    PLAIN = 2
    """In float outside of the delegate, or by several exact operators instead of an inexact one."""


def no_fallback(_: Node) -> Fallback:
    """For backends without a fallback: every refusal is final."""
    return Fallback.NONE


def fallback_of(node: Node) -> Fallback:
    """The fallback that a node is marked with."""
    return Fallback(node.meta.get("custom", {}).get(_KEY, Fallback.NONE))


def is_left_plain(node: Node) -> bool:
    """True for an operator whose float form in the backend was wrong too."""
    return fallback_of(node) is Fallback.PLAIN


def mark_fallback(node: Node, fallback: Fallback) -> None:
    """Mark a node and those that are fused with it with a fallback."""
    for one in _fused_with(node):
        one.meta["custom"] = {**one.meta.get("custom", {}), _KEY: int(fallback)}


class FloatRetries:
    """Repeats a lowering with one more operator in float each time it is refused for one.

    Args:
        gm: the canonical graph, which is not changed.
        last: the last fallback that the backend has for an operator.
    """

    def __init__(self, gm: GraphModule, *, last: Callable[[Node], Fallback]) -> None:
        self.gm = gm
        self._last = last
        self._first: Pt2eQuantError | None = None
        self._reasons: dict[str, str] = {}
        self._rest = _MOST

    def run(self, step: Callable[[], T]) -> T | None:
        """Run a step of the lowering; None if it failed and `gm` is now the graph to try next.

        Raises:
            UnsupportedError: the first refusal, where leaving its node in float does not help.
            ArtifactError: likewise.
        """
        try:
            return step()
        except (UnsupportedError, ArtifactError) as error:
            self._first = self._first or error
            if not self._mark(error):
                raise self._first from error.__cause__
            return None

    def regions(self) -> list[FloatRegion]:
        """The operators in float, for the report."""
        what = {n.name: fallback_of(n) for n in self.gm.graph.nodes if n.name in self._reasons}
        return [
            FloatRegion(
                node=name,
                what=f"runs in float{', with plain operators' * (what[name] > Fallback.FLOAT)}",
                reason=f"in integers it is refused: {reason}",
            )
            for name, reason in self._reasons.items()
        ]

    def _mark(self, error: Pt2eQuantError) -> bool:
        """Mark the node that an error names, or one before it; whether there was a fallback."""
        made = copy_graph(self.gm)
        calls = (n for n in made.graph.nodes if n.op == "call_function" and not is_qdq(n))
        node = next((n for n in calls if n.name == error.node_name), None)
        if node is None or not self._rest:
            return False
        # Where differences add up, the operator that shows them may be one that rounds nothing.
        before = _quantized_before(node) if isinstance(error, ArtifactError) else ()
        for one in (node, *before):
            fallback = _next(one, error)
            if fallback is not None and fallback <= self._last(one):
                self._rest -= 1
                mark_fallback(one, fallback)
                self._reasons.setdefault(one.name, error.what)
                self.gm = made
                return True
        return False


def _quantized_before(node: Node) -> Iterator[Node]:
    """The operators in integers that lead to a node, nearest first."""
    seen, rest = {node}, deque([node])
    while rest:
        for source in rest.popleft().all_input_nodes:
            if source.op == "call_function" and source not in seen:
                seen.add(source)
                rest.append(source)
                if not is_qdq(source) and any(_near(source)):
                    yield source


def _fused_with(node: Node) -> list[Node]:
    """A node, and what runtimes compute in one step with it: clips behind it, or what it clips."""
    found = [node]
    while is_call(found[0], CLIPS) and len(found[0].all_input_nodes[0].users) == 1:
        source = found[0].all_input_nodes[0]
        if source.op != "call_function" or is_qdq(source):
            break
        found.insert(0, source)
    while len(found[-1].users) == 1 and is_call(reader := next(iter(found[-1].users)), CLIPS):
        found.append(reader)
    return found


def _near(node: Node) -> Iterator[bool]:
    """True for each input that is a dequantize and each reader that is a quantize."""
    yield from map(is_dequantize, node.all_input_nodes)
    yield from map(is_quantize, node.users)


def _next(node: Node, error: Pt2eQuantError) -> Fallback | None:
    tried = fallback_of(node)
    if tried is Fallback.PLAIN:
        return None
    if any(_near(node)):
        return Fallback(tried + 1)
    # What this package refuses itself of an operator in float is refused everywhere.
    is_foreign = error.__cause__ is not None and not isinstance(error.__cause__, Pt2eQuantError)
    return Fallback.PLAIN if is_foreign or isinstance(error, ArtifactError) else None

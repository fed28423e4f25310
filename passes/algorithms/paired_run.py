"""The calls kept from calibration, run through a prepared graph in float and quantized."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.meta import attribute, constant_nodes
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, is_call
from pt2e_quant.graph.random_draws import draws
from pt2e_quant.observers.rounding import rounded
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.recurrent.round_recurrent import as_rounded

MOST_BYTES = 2**30
"""The most bytes of live values of all calls; where calls need more, fewer are run."""

Constants = Mapping[Node, Tensor]
"""Values in the place of what nodes hold or compute."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A value in one call.

    Args:
        exact: as the float model computes it.
        rounded: with all that is quantized rounded, up to here.
    """

    exact: Any
    rounded: Any


@dataclass(frozen=True, slots=True)
class Block:
    """Neighbouring nodes of a graph that one value leaves.

    Args:
        nodes: in graph order.
        output: the last of them, which alone is read later.
    """

    nodes: tuple[Node, ...]
    output: Node


def _is_one_size(pair: Pair) -> bool:
    shapes = [value.shape for value in (pair.exact, pair.rounded) if isinstance(value, Tensor)]
    return len(set(shapes)) < 2


def _aligned(pair: Pair) -> Pair:
    if not _is_one_size(pair):
        raise Declined(
            "sizes that depend on values differ between the float and the rounded run: there is "
            "no error at each position"
        )
    return pair


class PairedRun:
    """Runs a graph node by node in graph order, with two values at each node for each call.

    What an algorithm changes at a node counts for the quantized values behind it. So a correction
    sees the errors of all before it, corrected as they are (sequential, as Nagel et al. 2019,
    section 4.2, and Nagel et al. 2020, section 4, have it). The exact values are those of the
    constants that the float model has. Only values that are read later are held.

    Args:
        gm: prepared and calibrated, without statistics in it.
        calls: what each input of the graph was, by call.
        floats: what constants are in the float model, where they were changed.
    """

    def __init__(
        self, gm: GraphModule, calls: Mapping[Node, Sequence[Any]], floats: Mapping[Node, Tensor]
    ) -> None:
        self.gm = gm
        self._calls, self._floats = calls, floats
        self._nodes = list(gm.graph.nodes)
        self._place = {node: index for index, node in enumerate(self._nodes)}
        self._last = {n: max(map(self._where, n.users), default=-1) for n in self._nodes}
        self._fixed = fixed_nodes(gm.graph)
        self._written = frozenset(mutated_buffers(gm))
        self._drawn = frozenset(filter(draws, self._nodes))
        """What draws random numbers, which is the same in both."""
        kept = min(map(len, calls.values()))
        self.count = max(1, min(kept, MOST_BYTES // max(1, self._live_bytes())))
        self._next = 0
        self._values: list[dict[Node, Pair]] = [{} for _ in range(self.count)]
        self._rounded: dict[Node, tuple[Any, Any, Tensor]] = {}
        self._outputs: tuple[Node, list[Any], list[Any]] | None = None
        """A reached node whose outputs were asked for: its exact constants and outputs."""

    def reach(self, node: Node) -> None:
        """Run all before a node.

        Raises:
            ValueError: it has been passed.
        """
        stop = self._place[node]
        if stop < self._next:
            raise ValueError(f"{node.name} has been passed: sites come in graph order")
        with torch.no_grad():
            while self._next < stop:
                self._step(self._nodes[self._next])
                self._next += 1

    def operands(self, node: Node) -> Iterator[Pair]:
        """A value that has been computed and is still to be read, in each call.

        Raises:
            Declined: sizes that depend on values differ in the two.
        """
        for call in range(self.count):
            yield _aligned(
                Pair(self._value(node, call, exact=True), self._value(node, call, exact=False))
            )

    def outputs(self, node: Node) -> Iterator[Pair]:
        """The outputs of a reached node in each call, with its constants as they are now.

        Raises:
            Declined: sizes that depend on values differ in the two.
        """
        self.reach(node)
        found: list[Any] = []
        self._outputs = (node, self._exact_constants(node), found)
        with torch.no_grad():
            for call in range(self.count):
                found.append(self._compute(node, call, exact=True))
                yield _aligned(Pair(found[-1], self._compute(node, call, exact=False)))

    def replay(self, block: Block, call: int, constants: Constants, *, exact: bool) -> Any:
        """The output of a block that was reached, with other values of some nodes.

        Rounding passes gradients on, as if it were not there (straight through).
        """
        own: dict[Node, Any] = dict(constants)
        for node in block.nodes:
            if node not in own and node not in self._fixed:
                own[node] = self._compute(node, call, exact=exact, own=own)
        return own[block.output]

    def _step(self, node: Node) -> None:
        if node.op in ("get_attr", "output") or node in self._fixed:
            return
        done = [s for s in node.all_input_nodes if self._last[s] <= self._place[node]]
        known = self._known_outputs(node)
        for call, values in enumerate(self._values):
            exact = known[call] if known else self._compute(node, call, exact=True)
            made = Pair(exact, self._compute(node, call, exact=False))
            if node in self._drawn and _is_one_size(made):
                made = Pair(exact, exact)
            if node.users:
                values[node] = made
            for source in done:
                values.pop(source, None)
        for source in done:
            self._rounded.pop(source, None)

    def _known_outputs(self, node: Node) -> list[Any]:
        """The exact outputs of a node if `outputs` gave them all and its constants stayed."""
        known, self._outputs = self._outputs, None
        if known is None or known[0] is not node or len(known[2]) < self.count:
            return []
        pairs = zip(known[1], self._exact_constants(node), strict=True)
        return known[2] if all(_is_same(before, now) for before, now in pairs) else []

    def _exact_constants(self, node: Node) -> list[Any]:
        fixed = [source for source in node.all_input_nodes if source in self._fixed]
        return [self._constant(source, exact=True) for source in fixed]

    def _compute(
        self, node: Node, call: int, *, exact: bool, own: Mapping[Node, Any] | None = None
    ) -> Any:
        def value(source: Node) -> Any:
            if own is not None and source in own:
                return own[source]
            return self._value(source, call, exact=exact)

        if node.op == "placeholder":
            return self._calls[node][call]
        target: Any = node.target
        args, kwargs = map_arg(node.args, value), map_arg(node.kwargs, value)
        if node.op == "call_module":
            return args[0] if exact else round_through(attribute(self.gm, str(target)), args[0])
        function = target if exact else as_rounded(node)
        return function(*args, **kwargs)

    def _value(self, node: Node, call: int, *, exact: bool) -> Any:
        found = self._values[call].get(node)
        if found is not None:
            return found.exact if exact else found.rounded
        if node.op == "get_attr" and str(node.target) in self._written:
            # Each call starts from the state that the model has.
            state = attribute(self.gm, str(node.target))
            self._values[call][node] = Pair(state.clone(), state.clone())
            return self._value(node, call, exact=exact)
        return self._constant(node, exact=exact)

    def _constant(self, node: Node, *, exact: bool) -> Any:
        """The value of a constant, or of what is computed from constants alone."""
        if node.op == "get_attr":
            held = attribute(self.gm, str(node.target))
            return self._floats.get(node, held) if exact else held
        if node.op != "call_module":
            values = {s: self._constant(s, exact=exact) for s in node.all_input_nodes}
            target: Any = node.target
            args = map_arg(node.args, values.__getitem__)
            kwargs = map_arg(node.kwargs, values.__getitem__)
            return target(*args, **kwargs)
        held = self._constant(node.all_input_nodes[0], exact=exact)
        if exact:
            return held
        observer = attribute(self.gm, str(node.target))
        known = self._rounded.get(node)
        # Both are replaced, and not written, where an algorithm changes a weight or its scales.
        if known is None or known[0] is not held or known[1] is not observer:
            known = self._rounded[node] = (held, observer, rounded(observer, held))
        return known[2]

    def _where(self, node: Node) -> int:
        return self._place[node]

    def _live_bytes(self) -> int:
        """The most bytes that are live at once in one call, both values taken together."""
        live = most = 0
        ends: dict[int, int] = {}
        for index, node in enumerate(self._nodes):
            value = node.meta.get("val")
            if isinstance(value, Tensor) and node.op != "get_attr" and node not in self._fixed:
                size = 2 * value.element_size() * _product(value.shape)
                live += size
                end = max(index, self._last[node])
                ends[end] = ends.get(end, 0) + size
            most = max(most, live)
            live -= ends.pop(index, 0)
        return most


def _is_same(before: Any, now: Any) -> bool:
    """True of one tensor, and of views of all of it: none is written while a run has it."""
    if not (isinstance(before, Tensor) and isinstance(now, Tensor)):
        return before is now
    return (
        before.data_ptr() == now.data_ptr()
        and before.dtype == now.dtype
        and before.shape == now.shape
        and before.stride() == now.stride()
    )


def round_through(observer: Any, x: Any) -> Any:
    """Round a tensor as an observer does; the gradient is that of the tensor."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    if not x.requires_grad:
        return rounded(observer, x)
    with torch.no_grad():
        difference = rounded(observer, x) - x
    return x + difference


def fixed_nodes(graph: Graph) -> frozenset[Node]:
    """The nodes with the same value in every call: constants, and observers of such."""
    found = set(constant_nodes(graph))
    for node in graph.find_nodes(op="call_module"):
        if all(source in found for source in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _product(shape: Sequence[Any]) -> int:
    """The number of elements of a shape; a size that is not known counts as its example."""
    made = 1
    for size in shape:
        hint = size if isinstance(size, int) else getattr(size.node, "hint", None)
        made *= hint if isinstance(hint, int) else 1
    return made


def blocks(gm: GraphModule) -> list[Block]:
    """A graph with weights, cut wherever one value alone goes on: residual blocks, or layers.

    Values that no linear or convolution is before, such as masks and rotary tables, may go past.
    Nodes behind the last weight belong to no block.
    """
    fixed, found, nodes = fixed_nodes(gm.graph), [], []
    weighted: set[Node] = set()
    live: dict[Node, int] = {}
    has_weight = False
    for node in gm.graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or node in fixed:
            continue
        nodes.append(node)
        for source in node.all_input_nodes:
            if source in live:
                live[source] -= 1
                if not live[source]:
                    del live[source]
        is_weight = is_call(node, (*LINEAR, *CONV, *CONV_TRANSPOSE))
        has_weight = has_weight or is_weight
        if is_weight or any(source in weighted for source in node.all_input_nodes):
            weighted.add(node)
            if node.users:
                live[node] = len(node.users)
        if has_weight and list(live) == [node]:
            found.append(Block(tuple(nodes), node))
            nodes, has_weight = [], False
    return found

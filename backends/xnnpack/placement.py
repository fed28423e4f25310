"""Which elementwise operators and pools gain from integers.

Between two operators that work in integers, an add or a gelu in integers saves a dq and a q. In a
float region it only adds rounding: a transformer's residual stream and the input of a norm lose
several dB by it. So an operator that is light stays float unless its inputs
are integers already and its result is read as integers.
"""

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.backends.xnnpack.conditions import (
    AFTER_LINEAR,
    FEEDS_A_NORM,
    FLOAT_INPUTS,
    KEEP_FLOAT,
    LIGHT,
    READ_IN_FLOAT,
    TENSOR_OPERANDS,
)
from pt2e_quant.backends.xnnpack.gemm_rows import CLIPS
from pt2e_quant.backends.xnnpack.table import STATIC_ROWS
from pt2e_quant.graph.idioms.rms_norm import RMS_NORM, find_roots
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.op_table import OpRow
from pt2e_quant.graph.ops import GROUP_NORM, LAYER_NORM, MEAN, Family, aten, is_call
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import Note, PassResult, graph_pass

__all__ = ["NORMS", "place_elementwise"]

NORMS: Family = (
    *LAYER_NORM,
    *GROUP_NORM,
    *RMS_NORM,
    aten.instance_norm.default,
)

_PATTERNS = tuple((row, op) for row in STATIC_ROWS for op in row.find)

_SMOOTH = frozenset({"elu", "gelu", "hardswish", "leaky_relu", "sigmoid", "tanh"})
"""Rows of activation functions between which and a linear outlier channels are scaled."""

_AT_OUTPUT: Family = (
    *CLIPS,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.max_pool2d.default,
    aten.avg_pool2d.default,
    aten.adaptive_avg_pool2d.default,
    *MEAN,
)
"""Operators that are quantized also where only the program's output reads them."""


@graph_pass()
def place_elementwise(gm: GraphModule) -> PassResult:
    """Mark the light operators that stay float, each with the reason.

    Before:  add(linear(…), x) read by layer_norm
    After:   the same, the add marked "feeds a norm"
    """
    for node in gm.graph.nodes:
        node.meta.pop(KEEP_FLOAT, None)
    view = _View(gm)
    notes = []
    for anchor in (*view.light, *view.movers):
        reason = view.why_float(anchor)
        if reason is not None:
            anchor.meta[KEEP_FLOAT] = reason
            notes.append(Note(anchor.name, reason, skipped=True))
    return PassResult(changed=False, notes=tuple(notes))


def _runs(row: OpRow, match: Match) -> bool:
    # A number as operand becomes a tensor after placement, where it is worth one.
    return all(c.holds(match) for c in row.constraints if c is not TENSOR_OPERANDS)


class _View:
    """The graph as the table sees it: heavy, light and passive operators."""

    def __init__(self, gm: GraphModule) -> None:
        self.matches: dict[Node, tuple[OpRow, Match]] = {}
        self.covered: dict[Node, Node] = {}
        for row, match in find_matches(gm.graph, _PATTERNS, _runs):
            self.matches[match.anchor] = (row, match)
            self.covered |= dict.fromkeys(match.covered, match.anchor)
        self.light = [a for a, (row, _) in self.matches.items() if LIGHT[0] in row.constraints]
        self.movers = [a for a, (row, _) in self.matches.items() if row.is_passive]
        self.constants = constant_nodes(gm.graph)
        self.streams = self._streams(gm)
        self.integer = self._integer(gm)
        self.read = self._read(gm)

    def why_float(self, anchor: Node) -> str | None:
        """The reason to leave a light operator float; None if integers serve it."""
        if anchor in self.streams:
            return FEEDS_A_NORM
        if self._follows_linear(anchor):
            return AFTER_LINEAR
        if anchor not in self.integer:
            return FLOAT_INPUTS
        return None if anchor in self.read else READ_IN_FLOAT

    def _follows_linear(self, anchor: Node) -> bool:
        """Whether a smooth activation function works on what a linear gives."""
        if self.matches[anchor][0].name not in _SMOOTH:
            return False
        source = self._inputs(anchor)[0]
        while source in self.matches and self._carries(source):
            source = self._inputs(source)[0]
        return source in self.matches and self.matches[source][0].name == "linear"

    def _carries(self, anchor: Node) -> bool:
        """Whether it moves values, or scales them by a number, as one that caps logits does."""
        row = self.matches[anchor][0]
        return row.is_passive or (row.name in ("mul", "div") and len(anchor.all_input_nodes) == 1)

    def _inputs(self, anchor: Node) -> list[Node]:
        row, match = self.matches[anchor]
        names = {s.at for s in row.slots} & match.values.keys()
        edges = [e for name in sorted(names) for e in match.edges(name)]
        return [source for source, _ in edges]

    def _integer(self, gm: GraphModule) -> set[Node]:
        """Values that can be integers, inputs first."""
        found: set[Node] = set()
        for node in gm.graph.nodes:
            if node.op == "placeholder" and _is_float(node):
                found.add(node)
            if node not in self.matches or node in self.streams or self._follows_linear(node):
                continue
            row, _ = self.matches[node]
            sources = [s for s in self._inputs(node) if s not in self.constants]
            is_gemm = node not in self.light and not row.is_passive
            if is_gemm or (sources and all(s in found for s in sources)):
                found.add(node)
        return found

    def _read(self, gm: GraphModule) -> set[Node]:
        """Values that some reader takes as integers, outputs first."""
        found: set[Node] = set()
        for node in reversed(gm.graph.nodes):
            for user in node.users:
                if self._takes_integers(node, user, found):
                    found.add(node)
                    break
        return found

    def _takes_integers(self, node: Node, user: Node, read: set[Node]) -> bool:
        if user.op == "output":
            return is_call(node, _AT_OUTPUT)
        anchor = self.covered.get(user)
        if anchor is None or anchor in self.streams or anchor not in self.integer:
            return False
        row, _ = self.matches[anchor]
        return anchor in read if row.is_passive or anchor in self.light else True

    def _streams(self, gm: GraphModule) -> set[Node]:
        """Adds whose sum reaches a normalization through adds and movers alone."""
        found: set[Node] = set()
        waiting = [n.args[0] for n in gm.graph.nodes if is_call(n, NORMS)]
        waiting += find_roots(gm.graph).values()
        while waiting:
            node = waiting.pop()
            if not isinstance(node, Node) or node in found or node not in self.matches:
                continue
            row, _ = self.matches[node]
            if row.name in ("add", "sub"):
                found.add(node)
            elif not row.is_passive:
                continue
            waiting += self._inputs(node)
        return found


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

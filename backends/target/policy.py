"""Policy: operators that stay float although the op table could run them; users may overrule it.

Between two operators that work in integers, an add or a gelu in integers saves a dequantize and a
quantize. In a float region it only adds rounding: where the residual stream of a transformer is
quantized, MiniLM falls from 19 to 5 dB. So a light operator stays float unless its inputs are
integers already and something reads its result as integers.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qdq import is_dequantize
from pt2e_quant.core.schemes import Role
from pt2e_quant.graph.idioms.experts import ROUTER_KEY
from pt2e_quant.graph.idioms.spectra import SPECTRUM_KEY
from pt2e_quant.graph.meta import constant_nodes
from pt2e_quant.graph.op_table import (
    ALLOWED_KEY,
    KEEP_FLOAT_KEY,
    OUT,
    SLOWER,
    OpKind,
    OpRow,
    Preference,
)
from pt2e_quant.graph.ops import BATCH_NORM, DROPOUT, is_call
from pt2e_quant.graph.pattern import Match, find_matches
from pt2e_quant.graph.pipeline import GraphPass, Note, PassResult
from pt2e_quant.graph.subgraphs import copy_graph
from pt2e_quant.passes.batch_norm.detach_batch_norm import detach_batch_norms
from pt2e_quant.passes.cleanup.remove_dropout import detach_dropouts

FLOAT_INPUTS = Preference(
    name="float_inputs",
    text="inputs that are integers already",
    fix='quantizer.allowing("float_inputs"); in a float region integers only add rounding',
)
READ_IN_FLOAT = Preference(
    name="read_in_float",
    text="a reader that works in integers",
    fix='quantizer.allowing("read_in_float"); before a float operator integers only add rounding',
)

ROUTERS = Preference(
    name="routers",
    text="no choice of experts that is made by its result",
    fix='quantizer.allowing("routers"); another expert than the float model\'s costs a token more '
    "than all rounding, and a router has few weights",
    keeps=lambda row, match: row.kind is OpKind.HEAVY and ROUTER_KEY in match.anchor.meta,
)

SPECTRA = Preference(
    name="spectra",
    text="no logarithm of what it computes from the inputs",
    fix='quantizer.allowing("spectra"); a spectrum has values of all orders of magnitude, 8 bits '
    "round the small ones away, and the logarithm makes them count like the large ones",
    keeps=lambda row, match: any(SPECTRUM_KEY in node.meta for node in match.covered),
)


def slower_preference(fix: str, is_slower: "Callable[[OpRow, Match], bool]") -> Preference:
    """Operators whose class of sizes measured slower than float on the machine at hand stay float.

    An operator whose inputs are quantized already does not: in float it would dequantize its weight
    in every call.

    Args:
        fix: how to quantize them all the same.
        is_slower: whether an entry's match measured slower; False if it was not measured.
    """
    return Preference(
        name=SLOWER,
        text="a shape class that measured no slower than float here",
        fix=fix,
        keeps=lambda row, match: not _is_quantized(match) and is_slower(row, match),
    )


def _is_quantized(match: Match) -> bool:
    values = (v if isinstance(v, tuple) else (v,) for v in match.values.values())
    return any(isinstance(v, Node) and is_dequantize(v) for operands in values for v in operands)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A backend's preferences, as data.

    Args:
        rows: the op-table entries that integers flow between; none if the backend quantizes light
            operators wherever they stand.
        runs: whether an entry takes a match of a float graph, whatever is preferred.
        at_output: whether an operator that only the program's output reads gains from integers.
        requantizes: whether products without an output slot can give integers too, because their
            readers' quantize is fused.
        marks_moves: whether data movement that is read in float stays float too.
        exceptions: further preferences, with the operators that they keep float.
        of_matches: preferences that are known of a match alone (`Preference.keeps`).
    """

    rows: Sequence[OpRow] = ()
    runs: Callable[[OpRow, Match], bool] = lambda row, match: row.refusal(match) is None
    at_output: Callable[[Node], bool] = lambda _: True
    requantizes: bool = False
    marks_moves: bool = False
    exceptions: tuple[tuple[Preference, "Callable[[Regions], Collection[Node]]"], ...] = ()
    of_matches: tuple[Preference, ...] = ()

    @property
    def preferences(self) -> Mapping[str, Preference]:
        """Every preference by name."""
        own = (preference for preference, _ in self.exceptions)
        placed: Iterable[Preference] = (FLOAT_INPUTS, READ_IN_FLOAT, *own) if self.rows else ()
        return {p.name: p for p in (*placed, *self.of_matches)}

    def takes(self, row: OpRow, match: Match, allowed: Collection[str] = ()) -> bool:
        """True if an entry runs a match of a float graph, and no preference keeps it float.

        Args:
            row: the entry.
            match: of its pattern.
            allowed: the names of preferences that the user overrules.
        """
        asked = (p.keeps for p in self.of_matches if p.name not in allowed)
        return self.runs(row, match) and not any(keeps and keeps(row, match) for keeps in asked)


def place_integer_regions(policy: Policy) -> GraphPass:
    """A pass that marks the operators that stay float, each with its preference.

    Before:  add(linear(…), x) read by layer_norm
    After:   the same, the add marked "read_in_float"
    """

    def edit(gm: GraphModule) -> PassResult:
        nodes = {node.name: node for node in gm.graph.nodes}
        for node in nodes.values():
            node.meta.pop(KEEP_FLOAT_KEY, None)
        regions = Regions(_deployed(gm), policy)
        notes = []
        for anchor, (row, match) in regions.matches.items():
            kept = regions.why_float(anchor)
            is_marked = row.kind is OpKind.LIGHT or (
                policy.marks_moves and row.kind is OpKind.MOVES and kept is READ_IN_FLOAT
            )
            if kept is not None and is_marked:
                # All of them: a narrower entry would take those in front of the anchor alone.
                for covered in match.covered:
                    nodes[covered.name].meta[KEEP_FLOAT_KEY] = row.kind.value, kept.name
                notes.append(Note(anchor.name, kept.text, skipped=True))
        return PassResult(changed=False, notes=tuple(notes))

    return GraphPass("place_integer_regions", edit, needs=(), gives=())


def _deployed(gm: GraphModule) -> GraphModule:
    """The graph without what training alone has: batch norms behind convolutions, dropouts.

    Values that are integers on both sides of them are integers in the program that runs.
    """
    if not any(is_call(node, (*BATCH_NORM, *DROPOUT)) for node in gm.graph.nodes):
        return gm
    made = copy_graph(gm)
    detach_batch_norms(made)
    detach_dropouts(made)
    return made


class Regions:
    """The matches of an op table in a float graph, and where values can be integers.

    Args:
        gm: the graph.
        policy: of the backend.
    """

    def __init__(self, gm: GraphModule, policy: Policy) -> None:
        self.gm = gm
        self.policy = policy
        self.allowed: Collection[str] = gm.meta.get(ALLOWED_KEY, ())
        self.matches: dict[Node, tuple[OpRow, Match]] = {}
        self._anchor_of: dict[Node, Node] = {}
        patterns = [(row, op) for row in policy.rows for op in row.find]
        takes = policy.takes
        for row, match in find_matches(gm.graph, patterns, lambda r, m: takes(r, m, self.allowed)):
            self.matches[match.anchor] = (row, match)
            self._anchor_of |= dict.fromkeys(match.covered, match.anchor)
        self.constants = constant_nodes(gm.graph)
        self._kept: dict[Node, Preference] = {}
        for preference, find in policy.exceptions:
            if preference.name not in self.allowed:
                self._kept = dict.fromkeys(find(self), preference) | self._kept
        self._made = self._made_as_integers()
        self._read = self._read_as_integers()

    def inputs(self, anchor: Node) -> list[Node]:
        """The inputs of a match, without weights and biases."""
        row, match = self.matches[anchor]
        names = [s.at for s in row.slots if s.role is Role.INPUT and s.at in match.values]
        return [source for name in names for source, _ in match.edges(name)]

    def why_float(self, anchor: Node) -> Preference | None:
        """The preference that keeps a light or moving operator float; None for integers."""
        if anchor in self._kept:
            return self._kept[anchor]
        if anchor not in self._made:
            return FLOAT_INPUTS
        is_read = anchor in self._read or READ_IN_FLOAT.name in self.allowed
        return None if is_read else READ_IN_FLOAT

    def _made_as_integers(self) -> set[Node]:
        """Values that integer kernels, or inputs of the graph, can give as integers at no cost."""
        found: set[Node] = set()
        for node in self.gm.graph.nodes:
            if node.op == "placeholder" and _is_float(node):
                found.add(node)
            if node not in self.matches or node in self._kept:
                continue
            row, _ = self.matches[node]
            if not self.policy.requantizes and not any(slot.at == OUT for slot in row.slots):
                continue
            is_free = row.kind is OpKind.HEAVY or (
                row.kind is OpKind.LIGHT and FLOAT_INPUTS.name in self.allowed
            )
            sources = [] if is_free else [s for s in self.inputs(node) if s not in self.constants]
            if is_free or (sources and all(source in found for source in sources)):
                found.add(node)
        return found

    def _read_as_integers(self) -> set[Node]:
        """Values that some reader takes as integers; found from the outputs backwards."""
        found: set[Node] = set()
        for node in reversed(self.gm.graph.nodes):
            if any(self._takes_integers(node, user, found) for user in node.users):
                found.add(node)
        return found

    def _takes_integers(self, node: Node, user: Node, read: set[Node]) -> bool:
        if user.op == "output":
            return self.policy.at_output(node)
        anchor = self._anchor_of.get(user)
        if anchor is None:
            return False
        if self.matches[anchor][0].kind is OpKind.HEAVY:
            return node in self.inputs(anchor)  # no bias, and nothing that stays float
        return anchor in self._made and anchor in read


def _is_float(node: Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.is_floating_point()

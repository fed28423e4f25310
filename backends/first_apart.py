"""Find the first operator whose result differs between a failing artifact and its graph.

The graph is cut behind one value after another, what is in front of the cut is lowered by the same
backend, and its result compared with the graph's own. Which value is next is chosen as a bisection
of a history with branches does: the one whose verdict leaves the fewest values open. A part that
several searches cut is lowered once.
"""

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.backends.artifact import Artifact
from pt2e_quant.backends.cut_graph import cut_behind, operators, values_to_compare
from pt2e_quant.backends.rounding_noise import (
    bound_with_flips,
    flip_draws,
    run_with_flipped_steps,
)
from pt2e_quant.backends.sample_run import copied_leaves, run_graph, run_on_sample
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.sample import Sample, sqnr_db
from pt2e_quant.graph.alias import roots, writes
from pt2e_quant.graph.ops import NORMS, is_call

MOST_LOWERINGS = 16
"""So many cut graphs are lowered at most: a chain of 4000 values takes 12, and a few are for
branches and for values that cannot be lowered by themselves."""

LowerPart: TypeAlias = Callable[[GraphModule], Artifact]
"""Lowers a cut graph as the whole was, unchecked."""
MOST_KEPT = 32
"""So many programs are kept, each with its own weights: those that two searches lower at most."""

_NAMED = 3
"""So many operators are named one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstApart:
    """The result of the search.

    Args:
        text: for the error, behind what is wrong.
        node: of the graph that was searched; None if no place can be named.
        adds_up: each operator agrees with the graph's, given what it read.
    """

    text: str
    node: Node | None
    adds_up: bool = False


def find_first_apart(
    gm: GraphModule,
    sample: Sample,
    end: Node,
    pair: tuple[Any, Any],
    lower_part: LowerPart,
    bound_db: float,
) -> FirstApart | None:
    """The first operator at which an artifact differs from its graph by more than a bound.

    Args:
        gm: the canonical graph.
        sample: the call that the artifact was checked on.
        end: what the graph returns, or one of it, where the artifact is apart.
        pair: the value there, of the graph and of the artifact.
        lower_part: lowers a cut graph; where it raises, the value in question is passed over.
        bound_db: the least SQNR of what agrees.

    Returns:
        None where no part of the graph is apart by itself, or none could be lowered.
    """
    search = _Search(gm, sample, lower_part, bound_db)
    if len(pytree.tree_leaves(gm.graph.output_node().args[0])) > 1:
        return search.run_from_one_result(end)
    return search.run(end, _Verdict(sqnr_db(*pair), pair[1], agrees=False))


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The error of a cut program's value against the graph's, that value, and whether it agrees."""

    ratio_db: float
    value: Any
    agrees: bool


class _Search:
    """The values of one graph, what is known of them, and how they depend on each other.

    Sets of values are integers with a bit for each.
    """

    def __init__(
        self, gm: GraphModule, sample: Sample, lower_part: LowerPart, bound_db: float
    ) -> None:
        self.gm = gm
        self.sample = sample
        self.lower_part = lower_part
        self.bound_db = bound_db
        self.values = values_to_compare(gm)
        self.bit = {node: 1 << at for at, node in enumerate(self.values)}
        self.sources = _sources(gm)
        self.before = _values_before(self.sources, self.bit)
        self.verdicts: dict[Node, _Verdict | None] = {}
        self.lowerings = 0

    def run_from_one_result(self, end: Node) -> FirstApart | None:
        """Search in front of one of several results, if it is apart without the others."""
        verdict = self._verdict(end)
        if verdict is None:
            return None
        if verdict.agrees:
            return FirstApart(
                text=f"{end.name} is apart, but not where the program ends with it: "
                "no single operator is",
                node=None,
            )
        return self.run(end, verdict)

    def run(self, end: Node, verdict: _Verdict) -> FirstApart | None:
        """Search in front of a value that is apart."""
        self.verdicts[end] = verdict
        worse: Node | None = end
        while worse is not None:
            bad = self._narrow(worse)
            inner, borders, worse = self._behind(bad)
        return self._tell(end, bad, inner, borders)

    def _narrow(self, bad: Node) -> Node:
        """The first value that is apart among those before one that is, if none of them hides.

        Values before one that agrees are taken to agree; `_behind` looks at those that matter.
        """
        is_open = self.before[bad]
        for node in self.verdicts:
            is_open &= ~self.bit.get(node, 0)
        while is_open and self.lowerings < MOST_LOWERINGS:
            node = self._halving(is_open)
            verdict = self._verdict(node)
            is_open &= ~self.bit[node]
            if verdict is None:
                continue
            if verdict.agrees:
                is_open &= ~self.before[node]
            else:
                bad = node
                is_open &= self.before[node]
        return bad

    def _halving(self, is_open: int) -> Node:
        """The open value with the most even numbers of open ones before it and not."""
        total = is_open.bit_count()

        def evenness(node: Node) -> int:
            count = (self.before[node] & is_open).bit_count() + 1
            return min(count, total - count)

        return max((n for n in self.values if self.bit[n] & is_open), key=evenness)

    def _behind(self, bad: Node) -> tuple[set[Node], dict[Node, Any], Node | None]:
        """The nodes between a value that is apart and those before it that agree.

        Returns:
            The nodes; the values that agree, as the cut programs gave them; and a value that was
            taken to agree and does not, at which the others are incomplete.
        """
        inner: set[Node] = set()
        borders: dict[Node, Any] = {}
        todo = [bad]
        while todo:
            node = todo.pop()
            if node in inner or node in borders:
                continue
            verdict = self._verdict(node) if node in self.bit and node is not bad else None
            if verdict is None:
                inner.add(node)
                todo += self.sources[node]
            elif verdict.agrees:
                borders[node] = verdict.value
            else:
                return inner, borders, node
        return inner, borders, None

    def _verdict(self, node: Node) -> _Verdict | None:
        """Compare one value, once; None if what is before it cannot be lowered, or not any more."""
        if node not in self.verdicts:
            self.verdicts[node] = None
            if self.lowerings < MOST_LOWERINGS:
                self.lowerings += 1
                self.verdicts[node] = self._compare(node)
        return self.verdicts[node]

    def _compare(self, node: Node) -> _Verdict | None:
        with preserve_buffers(self.gm, capture_of(self.gm)), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            part = cut_behind(self.gm, node.name)
            expected = run_graph(part, self.sample)
            try:
                found = self.lower_part(part).run_leaves(copied_leaves(self.sample.leaves))[0]
            except Exception:  # Whatever a runtime raises: there is no program that ends here.
                return None
        value = found.clone() if isinstance(found, Tensor) else found
        ratio = sqnr_db(expected, [value])
        agrees = ratio >= self.bound_db or ratio >= self._bound_with_flips(part, expected, ratio)
        return _Verdict(ratio, value, agrees)

    def _bound_with_flips(self, part: GraphModule, expected: list[Any], ratio: float) -> float:
        calls = (partial(run_with_flipped_steps, part, draw=draw) for draw in flip_draws(part))
        flips = (sqnr_db(expected, run_on_sample(part, self.sample, call)) for call in calls)
        return bound_with_flips(self.bound_db, ratio, flips)

    def _tell(
        self, end: Node, bad: Node, inner: set[Node], borders: Mapping[Node, Any]
    ) -> FirstApart | None:
        if bad is end and not borders and self.before[end]:
            return None  # No part could be lowered.
        verdict = self.verdicts[bad]
        assert verdict is not None
        figure = f"{verdict.ratio_db:.1f} dB"
        inside = [node for node in operators(self.gm) if node in inner]
        # Of a few operators, a difference of large sums loses more digits than a sum or a product.
        norms = [node for node in inside if is_call(node, NORMS)]
        node = next(iter(norms or inside), bad)
        if borders and self._own_ratio_db(bad, borders, verdict.value) >= self.bound_db:
            return FirstApart(
                text=f"no single operator is apart: differences add up, past the bound at "
                f"{node.name}: {figure}",
                node=node,
                adds_up=True,
            )
        names = [n.name for n in inside] or [bad.name]
        if len(names) <= _NAMED:
            text = f"first apart at {', '.join(names)}: {figure}"
        else:
            text = f"first apart between {names[0]} and {names[-1]}: {figure}"
        if borders:
            text += ", what it reads agrees"
        if self.lowerings >= MOST_LOWERINGS:
            text += f" (the search ended after {MOST_LOWERINGS} lowerings)"
        return FirstApart(text=text, node=node)

    def _own_ratio_db(self, bad: Node, borders: Mapping[Node, Any], found: Any) -> float:
        """Return a value's error against the graph's result on the values that programs gave."""
        part = cut_behind(self.gm, bad.name)
        given = {node.name: value for node, value in borders.items()}

        def call(*leaves: Any) -> Any:
            return _Given(part, given).run(*leaves, enable_io_processing=False)

        return sqnr_db(run_on_sample(part, self.sample, call), [found])


class _Given(Interpreter):
    """Runs a graph with some of its values given."""

    def __init__(self, gm: GraphModule, given: Mapping[str, Any]) -> None:
        super().__init__(gm)
        self.given = given

    def run_node(self, n: Node) -> Any:
        """The given value of a node, else its own."""
        value = super().run_node(n)
        if n.name not in self.given:
            return value
        given = self.given[n.name]
        return given.to(value) if isinstance(given, Tensor) else given


def _sources(gm: GraphModule) -> dict[Node, list[Node]]:
    """For each node those that its result depends on: its inputs, and their earlier writers."""
    storage = roots(gm.graph)
    writers: defaultdict[object, list[Node]] = defaultdict(list)
    found = {}
    for node in gm.graph.nodes:
        places = [_place(storage[source]) for source in node.all_input_nodes]
        written = [_place(storage[value]) for value in writes(node)]
        found[node] = [*node.all_input_nodes, *(w for place in places for w in writers[place])]
        for place in written:
            writers[place] = [node]  # which depends on those before
    return found


def _place(root: Node) -> object:
    """A key of a value's storage: nodes that read one buffer share it."""
    return str(root.target) if root.op == "get_attr" else root


def _values_before(
    sources: Mapping[Node, Sequence[Node]], bit: Mapping[Node, int]
) -> dict[Node, int]:
    """For each node the values that it depends on."""
    found: dict[Node, int] = {}
    for node, read in sources.items():
        found[node] = 0
        for source in read:
            found[node] |= found[source] | bit.get(source, 0)
    return found


def lowered_once(lower_part: LowerPart) -> LowerPart:
    """Lower parts, each once: a check may search for the operator at fault once a result and call.

    Args:
        lower_part: lowers what `cut_behind` made of one graph, which the value it ends with names.

    Returns:
        The same, whose programs start with the buffers of a first call. What it could not lower
        it refuses with the same error.
    """
    known: OrderedDict[str, Artifact | Exception] = OrderedDict()

    def lower(part: GraphModule) -> Artifact:
        end = _end_of(part)
        if end not in known:
            try:
                known[end] = lower_part(part)
            except Exception as error:  # Whatever stops a lowering: the caller passes it over.
                known[end] = error
        known.move_to_end(end)
        while len(known) > MOST_KEPT:
            known.popitem(last=False)
        found = known[end]
        if isinstance(found, Exception):
            raise found
        found.reset()
        return found

    return lower


def _end_of(part: GraphModule) -> str:
    (end,) = pytree.tree_leaves(part.graph.output_node().args[0])
    assert isinstance(end, Node)
    return end.name

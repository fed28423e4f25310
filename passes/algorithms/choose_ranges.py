"""Choose the ranges of activations by what they cost on calibration calls that did not set them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node

from pt2e_quant.core.inexact import is_inexact
from pt2e_quant.core.progress import show_progress
from pt2e_quant.graph.meta import attribute
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.observed_run import (
    ObservedRun,
    OutputError,
    energy,
    exact_run,
    floats,
    ignore,
    is_float,
    rounded_as_observed,
    rounded_by,
)
from pt2e_quant.passes.algorithms.paired_run import fixed_nodes
from pt2e_quant.passes.algorithms.range_groups import (
    AS_OBSERVED,
    SQUARED,
    Calls,
    RangeGroup,
    Weighted,
    open_observers,
    range_groups,
    split_calls,
)

LEAST_CALLS = 6
"""Two to set ranges by, two to judge them on, and two to confirm the choice."""
CAUTIOUS = 1.25
"""By how much a tensor's error must fall for another range, in the more cautious of two choices."""
LEAST_GAIN_DB, LEAST_GAIN_IF_ALIKE_DB = 0.25, 0.1
"""By how much the whole model must gain over the observed ranges, on all calls but those that set
candidates: by the sum of their noise, or else in the mean over calls that are alike."""
CONFIRMED_DB = 0.1
"""By how much it must gain on calls that nothing was chosen by, by the sum of their noise."""
ALIKE = 0.2
"""Calls are alike if the maxima of a tensor in them deviate by at most so much of their size, in
the median tensor."""

BEYOND = 0.05
"""The assumed share of calls that exceed the range of calibration."""

FINALISTS = 2
"""Choices beside the observed ranges that calls without a part in them decide between."""
MOST_COMPARED = 4
"""In how many calls each tensor alone is rounded, in every second of them exceeded as well."""

T = TypeVar("T")
Compared = tuple[Sequence[Any], list[Tensor], float]
"""A call, what the float model makes of it, and its weight."""
Choice = dict[int, str]
"""The name of each group's range, by the id of its observer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseRanges(Algorithm):
    """Give activations the ranges that cost least on calibration calls that did not set them.

    An observer that keeps the range of all data is right where few large values matter, and wastes
    steps where they do not. Which it is depends on the tensor, on its readers and on the data.
    Some of the kept calls set other ranges, by least squared error and by percentiles. On half of
    these each range is judged by the error that rounding this tensor alone makes in the output of
    the operators that read it, in these calls and in one that exceeds them by as much as they
    differ from each other: a few calls do not show the largest one. The winners, those that win
    clearly, and the ranges of least squared error at all tensors are held against the observers' in
    the whole model with all that is quantized rounded, weights too, there too with a call that
    exceeds the others. The best two go on to calls that had no part in any of this. What is better
    on all these calls is taken if the model's output comes nearer to the float one on the new calls
    alone, and the gain on all is more than its standard error. Where calls are alike, none of a
    larger sample will exceed them by much: there the mean of the calls' own gains is evidence too,
    which a few calls tell more surely than the sum of their noise.

    Together the steps cost about two runs of the model for each call of calibration, 80 at most; of
    16 or fewer calls up to three.

    Args:
        any_observer: also where somebody chose the observer; False for ranges that a recipe left
            open (`PredictedRangeObserver`).
    """

    name: ClassVar[str] = "choose_ranges"
    paper: ClassVar[str] = (
        "after Nagel et al. 2021, A white paper on neural network quantization, section 3.1, "
        "arXiv 2106.08295"
    )
    fits: ClassVar[str] = "activations with calibrated (static) integers of at most 8 bits"
    stage: ClassVar[Stage] = Stage.RANGES
    needs_calls: ClassVar[bool] = True

    any_observer: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One for the whole graph: ranges are chosen together."""
        for node, _ in open_observers(graph.gm, any_observer=self.any_observer):
            yield Site(graph, node.all_input_nodes[0], "ranges")
            return

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Choose the ranges of all groups; each observer gets an `evidence` for its record."""
        graph = site.graph
        kept = graph.gathered.kept
        count = 0 if kept is None else len(kept.sample)
        if kept is None or count < LEAST_CALLS:
            raise Declined(
                f"ranges are as observed: a choice needs {LEAST_CALLS} calls, found {count}"
            )
        groups = range_groups(graph.gm, any_observer=self.any_observer)
        if not groups:
            raise Declined("ranges are as observed: all are of pooled features, logits or vectors")
        chooser = _Chooser(graph.gm, groups, split_calls(kept), progress=graph.gathered.progress)
        with torch.no_grad():
            chooser.fit()
            chooser.judge()
            if not any(group.errors for group in groups.values()):
                raise Declined("ranges are as observed: no other range differs from them")
            choice, text = chooser.confirmed()
        for key, name in choice.items():
            group = groups[key]
            made = group.observer if name == AS_OBSERVED else group.chosen(name)
            made.evidence = group.evidence(name)
            if made is not group.observer:
                for node in group.nodes:
                    graph.put_observer(node, made)
        return text


class _Chooser:
    """The steps of the choice, each one run of the model over some of the calls."""

    def __init__(
        self,
        gm: GraphModule,
        groups: dict[int, RangeGroup],
        calls: Calls,
        *,
        progress: bool,
    ) -> None:
        self.gm = gm
        self.progress = progress
        self.groups = groups
        self.calls = calls
        self.judged = [call for call, _ in calls.judged]
        self.group_of = {node: group for group in groups.values() for node in group.nodes}
        self.noise: dict[tuple[Node, Node, str], float] = defaultdict(float)
        self.signal: dict[tuple[Node, Node], float] = defaultdict(float)
        self.weight, self.is_exceeded = 1.0, False
        self.fixed = fixed_nodes(gm.graph)
        self.constants: dict[Node, Any] = {}
        """Weights rounded as they are now."""
        self.compared: list[Compared] = []
        """The data that the choice is judged on in the whole model."""

    def _show(self, calls: Sequence[T], text: str) -> Iterator[T]:
        return show_progress(calls, text, enabled=self.progress)

    def _see(self, node: Node, value: Any) -> Any:
        if node in self.group_of:
            self.group_of[node].see(node, value)
        return value

    def fit(self) -> None:
        """Set the candidates of each group."""
        run = ObservedRun(self.gm, self._see)
        for call in self._show(self.calls.fitted, "finding ranges"):
            run.call(call)
        for group in self.groups.values():
            group.set_candidates()

    def judge(self) -> None:
        """Measure each candidate at the output of what reads the tensor."""
        run = ObservedRun(self.gm, self._see)

        def measure(reader: Node, value: Any) -> None:
            for source in reader.all_input_nodes:
                group = self.group_of.get(source)
                if group is not None and len(group.qparams) > 1:
                    again = run.again if _is_pure(reader) and is_inexact(value) else None
                    for x, weight in self._calls_like(run.env[source], group.stretch(source)):
                        self._compare(group, (source, reader), x, weight, again)

        step = -(-len(self.judged) // MOST_COMPARED)
        for number, (call, weight) in enumerate(self._show(self.calls.judged, "judging ranges")):
            run.after = measure if number % step == 0 else ignore
            self.is_exceeded = number % (2 * step) == step  # when more maxima are known
            self.weight = weight
            self.compared.append((call, floats(run.call(call)), weight))
            if run.after is measure:
                self._measure_outputs(run)
        self.compared += self._exact(self._beyond())
        for (source, reader, name), noise in self.noise.items():
            errors = self.group_of[source].errors
            share = noise / max(self.signal[source, reader], 1e-30)
            errors[name] = errors.get(name, 0.0) + share

    def _measure_outputs(self, run: ObservedRun) -> None:
        """Measure the candidates of what the model returns: nothing in the graph reads it."""
        output = self.gm.graph.output_node()
        for source in output.all_input_nodes:
            group = self.group_of.get(source)
            if group is not None and len(group.qparams) > 1:
                for x, weight in self._calls_like(run.env[source], group.stretch(source)):
                    self._compare(group, (source, output), x, weight, None)

    def _calls_like(self, given: Tensor, stretch: float) -> Iterator[tuple[Tensor, float]]:
        """A value in one call, and in one that exceeds it, with their weights."""
        yield given, self.weight
        if self.is_exceeded:
            yield given * stretch, 2 * BEYOND * self.weight

    def _compare(
        self,
        group: RangeGroup,
        edge: tuple[Node, Node],
        value: Tensor,
        weight: float,
        again: Callable[[Node, Node, Tensor], Any] | None,
    ) -> None:
        """Add a call's noise and signal at a reader, or at the tensor itself.

        At the tensor where the reader cannot run again, or gives no floats: noise has no meaning in
        an index or a comparison.
        """
        source, reader = edge
        expected = value if again is None else again(reader, source, value)
        self.signal[edge] += weight * energy(expected)
        for name, qparams in group.qparams.items():
            rounded = rounded_by(qparams, value)
            found = rounded if again is None else again(reader, source, rounded)
            self.noise[source, reader, name] += weight * energy(found - expected)

    def tried(self) -> list[Choice]:
        """Return the choices to compare, the observed ranges first; equal choices are one."""
        judged = {key: group for key, group in self.groups.items() if group.errors}
        found: list[Choice] = [dict.fromkeys(judged, AS_OBSERVED)]
        winners = {key: group.winner() for key, group in judged.items()}
        cautious = {key: group.winner(CAUTIOUS) for key, group in judged.items()}
        squares = {
            key: SQUARED if SQUARED in group.errors else AS_OBSERVED
            for key, group in judged.items()
        }
        for choice in (winners, cautious, squares):
            if choice not in found:
                found.append(choice)
        return found

    def confirmed(self) -> tuple[Choice, str]:
        """The choice that is best in the whole model and holds on calls that had no part in it.

        And a line that says so. Few calls tell little of which choice is best: the calls that
        confirm have a say in it too.
        """
        tried = self.tried()
        observed = tried[0]
        if len(tried) == 1:
            return observed, (
                f"0 of {len(self.groups)} activation ranges differ from the observed ones: others "
                f"were no better on {len(self.judged)} calls"
            )
        is_alike = self._are_alike()
        judged = self._whole(tried, self.compared)

        def gain(at: int) -> float:
            in_calls = judged[at].gain_in_calls(judged[0]) if is_alike else 0.0
            return judged[at].sure_gain(judged[0], errors=0.0) + in_calls

        best = [0, *sorted(range(1, len(tried)), key=gain, reverse=True)[:FINALISTS]]
        tried, judged = [tried[at] for at in best], [judged[at] for at in best]
        unseen = self._exact(self.calls.unseen)
        confirming = self._whole(tried, unseen, "confirming ranges")
        both = [a + b for a, b in zip(judged, confirming, strict=True)]
        others = range(1, len(tried))
        gains = [error.sure_gain(both[0], errors=0.0) for error in both]
        taken = [at for at in others if _gains(both, at) and _gains_unseen(confirming, at)]
        if is_alike and not taken:
            gains = [error.gain_in_calls(both[0]) for error in both]
            taken = [at for at in others if _gains_in_calls(both, at)]
        at = max(taken or others, key=gains.__getitem__)
        before, after = confirming[0], confirming[at]
        changed = sum(name != AS_OBSERVED for name in tried[at].values())
        where = (
            f"on {len(unseen)} calls that had no part in the choice, the quantized model is at "
            f"{after.db:.1f} dB with {changed} other ranges and at {before.db:.1f} dB with the "
            f"observed ones; the gain on all calls is {gains[at]:.1f} dB"
        )
        if not taken:
            return observed, f"ranges are as observed: {where}"
        return tried[at], (
            f"{changed} of {len(self.groups)} activation ranges differ from the observed ones: "
            f"{where}"
        )

    def _are_alike(self) -> bool:
        """True if the maxima of tensors hardly differ between calls."""
        spreads = [group.spread(node) for group in self.groups.values() for node in group.maxima]
        return bool(spreads) and median(spreads) <= ALIKE

    def _exact(self, calls: Iterable[Weighted]) -> list[Compared]:
        """Calls with what the float model makes of them."""
        plain = exact_run(self.gm, {})
        return [(call, floats(plain.call(call)), weight) for call, weight in calls]

    def _whole(
        self,
        choices: Sequence[Choice],
        compared: Sequence[Compared],
        text: str = "comparing ranges",
    ) -> list[OutputError]:
        """Return the error of the model's output with all rounded, for each choice."""
        runs = [ObservedRun(self.gm, self._rounding(choice)) for choice in choices]
        errors = [OutputError() for _ in runs]
        for call, expected, weight in self._show(compared, text):
            for error, run in zip(errors, runs, strict=True):
                error.add(expected, floats(run.call(call)), weight)
        return errors

    def _beyond(self) -> list[Weighted]:
        """The middle one of the calls, made to exceed calibration, and how many it stands for.

        Of n + 1 calls alike, each is as likely as the others to be the greatest.
        """
        inputs = self.gm.graph.find_nodes(op="placeholder")
        factors = [
            max((self.group_of[u].stretch(u) for u in node.users if u in self.group_of), default=1)
            for node in inputs
        ]
        if max(factors, default=1.0) == 1.0:
            return []
        sizes = [sum(energy(v) for v in call if is_float(v)) for call in self.judged]
        middle = self.judged[sorted(range(len(sizes)), key=sizes.__getitem__)[len(sizes) // 2]]
        made = [v * f if f != 1.0 else v for v, f in zip(middle, factors, strict=True)]
        total = sum(weight for _, weight in self.calls.judged)
        return [(made, total / (len(self.judged) + len(self.calls.fitted) + 1))]

    def _rounding(self, choice: Choice) -> Callable[[Node, Any], Any]:
        def observe(node: Node, value: Any) -> Any:
            group = self.group_of.get(node)
            if group is not None:
                name = choice.get(id(group.observer), AS_OBSERVED)
                return rounded_by(group.qparams[name], value)
            if node not in self.fixed:
                return self._rounded(node, value)
            if node not in self.constants:
                self.constants[node] = self._rounded(node, value)
            return self.constants[node]

        return observe

    def _rounded(self, node: Node, value: Any) -> Any:
        """A weight, or an activation whose range is not open; biases are as good as exact."""
        return rounded_as_observed(attribute(self.gm, str(node.target)), value)


def _gains(errors: Sequence[OutputError], at: int) -> bool:
    """True if a choice is better than the first beyond chance, by all calls together."""
    is_gain = errors[at].db > errors[0].db + LEAST_GAIN_DB
    return is_gain and errors[at].sure_gain(errors[0]) >= CONFIRMED_DB


def _gains_unseen(errors: Sequence[OutputError], at: int) -> bool:
    return errors[at].db >= errors[0].db + CONFIRMED_DB


def _gains_in_calls(errors: Sequence[OutputError], at: int) -> bool:
    """True if a choice gains beyond chance in the mean over calls, and loses nothing in all."""
    is_sure = errors[at].gain_in_calls(errors[0], errors=1.0) >= 0
    is_gain = errors[at].gain_in_calls(errors[0]) >= LEAST_GAIN_IF_ALIKE_DB
    return is_sure and is_gain and errors[at].db >= errors[0].db


def _is_pure(node: Node) -> bool:
    """True if an operator may be run again: it writes nothing."""
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable

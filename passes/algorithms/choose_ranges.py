"""Choose the ranges of activations by what they cost on calibration calls that did not set them."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, log10
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.alias import mutated_buffers
from pt2e_quant.graph.ops import CONV, LINEAR, argument, arguments, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.range_groups import (
    AS_OBSERVED,
    Calls,
    RangeGroup,
    open_observers,
    range_groups,
    split_calls,
)

LEAST_CALLS = 4
"""Two to set ranges by, and two to judge them on."""
LEAST_GAINS = (1.0, 1.25)
"""By what factor a tensor's error must fall for another range: two choices, held against each
other in the whole model."""
LEAST_GAIN_DB = 0.25
"""By how much the whole model must gain over the observed ranges."""
LEAST_STEP_DB = 0.05
"""By how much it must gain by another range of one group."""

BEYOND = 0.05
"""How often a call is taken to exceed what calibration saw."""

MOST_ROWS = 16
"""Of the outputs of a linear or convolution, how many are compared."""
MOST_COMPARED = 4
"""In how many calls each tensor alone is rounded, in every second of them exceeded as well."""

T = TypeVar("T")
Choice = dict[int, str]
"""The name of each group's range, by the id of its observer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChooseRanges(Algorithm):
    """Give activations the ranges that cost least on calibration calls that did not set them.

    An observer that keeps the range of all data is right where few large values matter, and wastes
    steps where they do not. Which it is depends on the tensor, on its readers and on the data.
    Half of the kept calls set other ranges, by least squared error and by percentiles. On the other
    half each range is judged by the error that rounding this tensor alone makes in the output of
    the operators that read it, in these calls and in one that exceeds them by as much as they
    differ from each other: a few calls do not show the largest one. The winners are held against
    the observers' ranges in the whole model with all activations rounded, there too with a call
    that exceeds the others, and taken only where the model's output comes nearer to the float one.
    By the rules that won, all kept calls then set the ranges.

    At most half as many calls are used as calibration made, but eight. Together the steps cost
    about as much as four runs of the float model over each.

    Args:
        varies: how many groups, those that cost most, are varied one by one in the whole model.
    """

    name: ClassVar[str] = "choose_ranges"
    paper: ClassVar[str] = (
        "after Nagel et al. 2021, A white paper on neural network quantization, section 3.1, "
        "arXiv 2106.08295"
    )
    fits: ClassVar[str] = "activations with calibrated (static) integers of at most 8 bits"
    stage: ClassVar[Stage] = Stage.RANGES
    needs_calls: ClassVar[bool] = True

    varies: int = 0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One for the whole graph: ranges are chosen together."""
        for node, _ in open_observers(graph.gm):
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
        groups = range_groups(graph.gm)
        if not groups:
            raise Declined("ranges are as observed: all are of pooled features, logits or vectors")
        chooser = _Chooser(graph.gm, groups, split_calls(kept), progress=graph.gathered.progress)
        with torch.no_grad():
            chooser.fit()
            chooser.judge()
            if not any(group.errors for group in groups.values()):
                raise Declined("ranges are as observed: no other range differs from them")
            choice, text = chooser.decide(self.varies)
        for key, name in choice.items():
            group = groups[key]
            made = group.observer if name == AS_OBSERVED else group.chosen(name)
            made.evidence = group.evidence(name)
            if made is not group.observer:
                for node in group.nodes:
                    graph.put_observer(node, made)
        return text


class _Run(Interpreter):
    """Runs a prepared graph with something else in the place of its observers."""

    def __init__(self, gm: GraphModule, observe: Callable[[Node, Any], Any]) -> None:
        super().__init__(gm, garbage_collect_values=True)
        self.observe = observe
        self.written = frozenset(mutated_buffers(gm))
        self.after: Callable[[Node, Any], None] = _ignore

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """The flat outputs of one call, which starts from the state that the model has."""
        given = pytree.tree_map_only(Tensor, Tensor.clone, tuple(inputs))
        return pytree.tree_leaves(self.run(*given, enable_io_processing=False))

    def run_node(self, n: Node) -> Any:
        """Run one node; an observer hands on what `observe` makes of its input."""
        if n.op == "call_module":
            return self.observe(n, self.env[n.all_input_nodes[0]])
        value = super().run_node(n)
        if n.op == "get_attr" and str(n.target) in self.written:
            return value.clone()
        self.after(n, value)
        return value

    def again(self, node: Node, source: Node, value: Tensor) -> Any:
        """What an operator computes of another value of one of its inputs.

        Of a linear or convolution with many outputs some are computed, at even distances.
        """

        def read(n: Node) -> Any:
            return value if n is source else self.env[n]

        given = {name: _filled(value, read) for name, value in arguments(node).items()}
        if is_call(node, LINEAR) or (is_call(node, CONV) and argument(node, "groups") == 1):
            step = max(1, len(given["weight"]) // MOST_ROWS)
            sampled = {name: given[name] for name in ("weight", "bias")}
            given |= {name: v if v is None else v[::step] for name, v in sampled.items()}
        return node.target(**given)  # type: ignore[operator]  # an operator


def _filled(given: Any, read: Callable[[Node], Any]) -> Any:
    """Arguments with values for nodes, in plain lists: operators refuse torch.fx's own."""
    if isinstance(given, Node):
        return read(given)
    if isinstance(given, Mapping):
        return {key: _filled(value, read) for key, value in given.items()}
    if isinstance(given, (list, tuple)):
        made = [_filled(value, read) for value in given]
        return made if isinstance(given, list) else tuple(made)
    return given


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
        self.fitted, self.judged, self.weights = calls.fitted, calls.judged, calls.weights
        self.group_of = {node: group for group in groups.values() for node in group.nodes}
        self.noise: dict[tuple[Node, Node, str], float] = defaultdict(float)
        self.signal: dict[tuple[Node, Node], float] = defaultdict(float)
        self.weight, self.is_exceeded = 1.0, False
        self.compared: list[tuple[Sequence[Any], list[Tensor], float]] = []
        """The calls of the whole model, what the float model makes of them, and their weights."""

    def _show(self, calls: Sequence[T], text: str) -> Iterator[T]:
        return show_progress(calls, text, enabled=self.progress)

    def _see(self, node: Node, value: Any) -> Any:
        if node in self.group_of:
            self.group_of[node].see(node, value)
        return value

    def fit(self) -> None:
        """Set the candidates of each group by the first half of the calls."""
        run = _Run(self.gm, self._see)
        for call in self._show(self.fitted, "finding ranges"):
            run.call(call)
        for group in self.groups.values():
            group.set_candidates()

    def judge(self) -> None:
        """Measure each candidate at the output of what reads the tensor, on the other half."""
        run = _Run(self.gm, self._see)

        def measure(reader: Node, value: Any) -> None:
            for source in reader.all_input_nodes:
                group = self.group_of.get(source)
                if group is not None and len(group.qparams) > 1:
                    again = run.again if _is_pure(reader) and isinstance(value, Tensor) else None
                    for x, weight in self._calls_like(run.env[source], group.stretch(source)):
                        self._compare(group, (source, reader), x, weight, again)

        step = -(-len(self.judged) // MOST_COMPARED)
        for number, call in enumerate(self._show(self.judged, "judging ranges")):
            run.after = measure if number % step == 0 else _ignore
            self.is_exceeded = number % (2 * step) == step  # when more maxima are known
            self.weight = self.weights[number]
            self.compared.append((call, _floats(run.call(call)), self.weight))
        plain = _Run(self.gm, lambda node, value: value)
        for call, weight in self._beyond():
            self.compared.append((call, _floats(plain.call(call)), weight))
        for (source, reader, name), energy in self.noise.items():
            errors = self.group_of[source].errors
            share = energy / max(self.signal[source, reader], 1e-30)
            errors[name] = errors.get(name, 0.0) + share

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
        """Add a call's noise and signal at a reader, or at the tensor if that cannot run again."""
        source, reader = edge
        expected = value if again is None else again(reader, source, value)
        self.signal[edge] += weight * _energy(expected)
        for name, qparams in group.qparams.items():
            rounded = _rounded(value, qparams)
            found = rounded if again is None else again(reader, source, rounded)
            self.noise[source, reader, name] += weight * _energy(found - expected)

    def decide(self, varies: int) -> tuple[Choice, str]:
        """The choice that is best in the whole model, and a line that says so."""
        judged = {key: group for key, group in self.groups.items() if group.errors}
        tried: list[Choice] = [dict.fromkeys(judged, AS_OBSERVED)]
        for least_gain in LEAST_GAINS:
            choice = {key: group.winner(least_gain) for key, group in judged.items()}
            if choice not in tried:
                tried.append(choice)
        scores = self._whole(tried)
        best = max(range(len(tried)), key=scores.__getitem__)
        best = best if scores[best] > scores[0] + LEAST_GAIN_DB else 0
        choice, score = self._vary(tried[best], scores[best], varies)
        changed = sum(name != AS_OBSERVED for name in choice.values())
        text = f"{changed} of {len(self.groups)} activation ranges differ from the observed ones"
        return choice, (
            f"{text}; on {len(self.judged)} calls that did not set them, the model with rounded "
            f"activations is at {score:.1f} dB instead of {scores[0]:.1f} dB"
        )

    def _whole(self, choices: Sequence[Choice]) -> list[float]:
        """SQNR of the model's output with all activations rounded, for each choice."""
        runs = [_Run(self.gm, self._rounding(choice)) for choice in choices]
        signal, noise = 0.0, [0.0] * len(runs)
        for call, expected, weight in self._show(self.compared, "comparing ranges"):
            signal += weight * sum(map(_energy, expected))
            for index, run in enumerate(runs):
                found = _floats(run.call(call))
                error = sum(_energy(f - e) for f, e in zip(found, expected, strict=True))
                noise[index] += weight * error
        return [10 * log10(signal / n) if n > 0 < signal else inf for n in noise]

    def _beyond(self) -> list[tuple[list[Any], float]]:
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
        sizes = [sum(_energy(v) for v in call if _is_float(v)) for call in self.judged]
        middle = self.judged[sorted(range(len(sizes)), key=sizes.__getitem__)[len(sizes) // 2]]
        made = [v * f if f != 1.0 else v for v, f in zip(middle, factors, strict=True)]
        return [(made, sum(self.weights) / (len(self.judged) + len(self.fitted) + 1))]

    def _rounding(self, choice: Choice) -> Callable[[Node, Any], Any]:
        def observe(node: Node, value: Any) -> Any:
            group = self.group_of.get(node)
            if group is None:
                return value
            name = choice.get(id(group.observer), AS_OBSERVED)
            return _rounded(value, group.qparams[name])

        return observe

    def _vary(self, choice: Choice, score: float, groups: int) -> tuple[Choice, float]:
        """Try other ranges of the groups that cost most, one by one, in the whole model.

        Those that are worse for the readers than the observed one are not tried.
        """
        costly = sorted(choice, key=lambda key: -self.groups[key].errors[choice[key]])
        for key in costly[:groups]:
            errors = self.groups[key].errors
            others = [n for n in errors if n != choice[key] and errors[n] <= errors[AS_OBSERVED]]
            varied = [choice | {key: name} for name in others]
            scores = self._whole(varied) if varied else []
            if scores and max(scores) > score + LEAST_STEP_DB:
                score = max(scores)
                choice = varied[scores.index(score)]
        return choice, score


def _ignore(node: Node, value: Any) -> None:
    """Nothing is to be measured behind a node."""


def _is_pure(node: Node) -> bool:
    """Whether an operator may be run again: it writes nothing."""
    return isinstance(node.target, OpOverload) and not node.target._schema.is_mutable


def _is_float(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _floats(values: Iterable[Any]) -> list[Tensor]:
    return [value for value in values if _is_float(value)]


def _energy(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.float()).item()) ** 2


def _rounded(value: Tensor, qparams: QParams) -> Tensor:
    rounded = torch.fake_quantize_per_tensor_affine(
        value.float(),
        float(qparams.scale),
        int(qparams.zero_point),
        qparams.quant_min,
        qparams.quant_max,
    )
    return rounded.to(value.dtype)

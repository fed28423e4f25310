"""Groups of activations whose range is open, what their candidates cost, and on which calls."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import exp, log
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from pt2e_quant.core.qparams import QParams, choose_qparams
from pt2e_quant.graph.meta import attribute
from pt2e_quant.observers.qschemes import SYMMETRIC
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import cheapest_ranges, ranges_within, squared_errors
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls
from pt2e_quant.observers.training.trained_qparams import is_fake_quantize, qparams_of
from pt2e_quant.passes.algorithms.algorithm_graph import is_static_per_tensor

SQUARED = "squared error"
PERCENTILES = (99.999, 99.99, 99.9)
_SHARES = torch.exp2(-torch.arange(10, dtype=torch.float64) / 6)
"""Of an end of the observed range, down to a third."""
_FINALISTS = 12
"""Of all pairs of ends, how many are compared exactly."""


class RangeCandidates(PercentileObserver):
    """A histogram, and the ranges that different rules find in it."""

    def ranges(self) -> dict[str, tuple[float, float]]:
        """The least and the greatest value of each candidate, by the name of its rule."""
        found = {SQUARED: self._least_squares()}
        for percentile in PERCENTILES:
            self.percentile = percentile
            found[f"{percentile:g} %"] = self.optimal_range()
        return {name: (low.item(), high.item()) for name, (low, high) in found.items()}

    def _least_squares(self) -> tuple[Tensor, Tensor]:
        """The least squared error among a few shares of each end.

        Each candidate is judged by what it costs its readers: the last percent of this error, for
        which `MSEObserver` takes ten times as long, decides nothing.
        """
        data = self.binned_data()
        whole = torch.stack([self.min_val.clamp(max=0.0), self.max_val.clamp(min=0.0)])
        whole = whole.double().cpu()
        if self.is_symmetric:
            whole = whole.abs().max() * torch.tensor([-1.0, 1.0])
        ranges = ranges_within(whole, _SHARES.expand(2, -1), self.is_symmetric)
        low, high = cheapest_ranges(data, ranges, self.quant_max - self.quant_min, _FINALISTS)
        scale, zero_point = self._choose(low.float(), high.float())
        errors = squared_errors(data, scale, zero_point, self.quant_min, self.quant_max)
        best = int(errors.argmin())
        return low[best], high[best]


class ChosenRangeObserver(MinMaxObserver):
    """A range that was chosen after calibration, beside the one that was seen.

    Args:
        dtype: integer dtype to quantize to.
        qscheme: per_tensor_affine or per_tensor_symmetric.
        **kwargs: as of `MinMaxObserver`.
    """

    def __init__(self, dtype: torch.dtype, qscheme: torch.qscheme, **kwargs: Any) -> None:
        super().__init__(dtype, qscheme, **kwargs)
        self.chosen = (0.0, 0.0)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of the chosen range, both [1]."""
        low, high = (self.min_val.new_tensor(end) for end in self.chosen)
        return self.qparams_of(low, high)


AS_OBSERVED = "as observed"
"""The name of the range that the observer itself gives."""

MOST_LEVELS = 256
MOST_USED = 12
"""Calls that set ranges, half of which judge them; the others confirm the choice."""
LARGEST_SHARE = 4
"""Of the calls that set and judge, one in so many is one of the largest that calibration made."""
RUNS = 2
"""Of the model for each call of calibration, at most, where the calls that confirm can be fewer."""
COMPARED, CONFIRMED = 4, 3
"""Choices that judged calls decide between in the whole model, and those that confirm."""
SPREADS = 1.5
"""By how many standard deviations of the calls' maxima a call that is not seen exceeds them."""


@dataclass(slots=True, eq=False)
class RangeGroup:
    """Tensors of one observer.

    Args:
        observer: theirs.
        nodes: its nodes.
        seen: a histogram of the calls that set ranges.
        qparams: of each candidate, by name.
        ends: of each but the observer's own.
        errors: of each candidate, noise to signal summed over the readers.
        maxima: the largest magnitude of each call, by node.
    """

    observer: Any
    nodes: list[Node]
    seen: RangeCandidates
    qparams: dict[str, QParams] = field(default_factory=dict)
    ends: dict[str, tuple[float, float]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    maxima: dict[Node, list[float]] = field(default_factory=dict)

    def see(self, node: Node, value: Tensor) -> None:
        """Note the maximum of a tensor; of a call that sets ranges, also its histogram."""
        if not self.qparams:
            self.seen(value)
        self.maxima.setdefault(node, []).append(float(value.abs().amax()))

    def set_candidates(self) -> None:
        """Find the ranges that the histogram speaks for; those that hardly differ are one.

        They stay: what is judged is what the graph gets.
        """
        self.qparams = {AS_OBSERVED: qparams_of(self.observer)}
        if not self.seen.seen or bool(self.seen.min_val == self.seen.max_val):
            return
        known = float(self.observer.min_val.min()), float(self.observer.max_val.max())
        for name, (low, high) in self.seen.ranges().items():
            # Algorithms may have narrowed the range: nothing beyond it matters to the readers.
            ends = max(low, known[0]), min(high, known[1])
            found = qparams_over(self.observer, ends)
            if all(_differ(found, other) for other in self.qparams.values()):
                self.qparams[name], self.ends[name] = found, ends

    def spread(self, node: Node) -> float:
        """The standard deviation of the logarithms of the calls' maxima at a node."""
        logs = [log(maximum) for maximum in self.maxima.get(node, ()) if maximum > 0]
        return statistics.stdev(logs) if len(logs) > 1 else 0.0

    def stretch(self, node: Node) -> float:
        """By what factor a call that calibration lacks may exceed the others at a node."""
        return exp(SPREADS * self.spread(node))

    def ranked(self) -> list[str]:
        """The candidates, best first; of equals the observer's own range."""
        return sorted(self.errors, key=lambda name: (self.errors[name], name != AS_OBSERVED))

    def winner(self, least_gain: float = 1.0) -> str:
        """The best candidate if it is better than the observer's range by a factor."""
        best = self.ranked()[0]
        is_gain = self.errors[best] * least_gain < self.errors[AS_OBSERVED]
        return best if is_gain else AS_OBSERVED

    def evidence(self, name: str) -> str:
        """The note on a chosen range: the runner-up, and how much worse it is."""
        others = [other for other in self.ranked() if other != name]
        if not others:
            return f"{name}: no other range differs"
        text = f"{name}; runner-up {others[0]}: {self._times(others[0], name)} the error"
        if AS_OBSERVED in (name, others[0]):
            return text
        return f"{text}, {AS_OBSERVED}: {self._times(AS_OBSERVED, name)}"

    def chosen(self, name: str) -> ChosenRangeObserver:
        """An observer of one of the candidates."""
        old = self.observer
        made = ChosenRangeObserver(
            old.dtype,
            old.qscheme,
            quant_min=old.quant_min,
            quant_max=old.quant_max,
            eps=float(old.eps),
        )
        made.min_val.copy_(old.min_val.min())
        made.max_val.copy_(old.max_val.max())
        made.chosen = self.ends[name]
        return made.to(old.min_val.device)

    def _times(self, name: str, other: str) -> str:
        return f"{self.errors[name] / max(self.errors[other], 1e-30):.2f}x"


def open_observers(gm: GraphModule, *, any_observer: bool = True) -> Iterator[tuple[Node, Any]]:
    """The observer nodes of activations with one static scale of at most 8 bits.

    Without `any_observer` those of recipes' own observers.
    """
    for node in gm.graph.find_nodes(op="call_module"):
        observer: Any = attribute(gm, str(node.target))
        if node.all_input_nodes[0].op == "get_attr" or not is_static_per_tensor(observer):
            continue
        if is_fake_quantize(observer) or hasattr(observer, "derive_qparams_fn"):
            continue
        if not any_observer and type(observer) is not PredictedRangeObserver:
            continue
        low, high = (getattr(observer, name, None) for name in ("quant_min", "quant_max"))
        if low is not None and high is not None and high - low < MOST_LEVELS:
            yield node, observer


def is_chosen(gm: GraphModule) -> bool:
    """True if somebody chose the observers of all static activations."""
    kinds = {type(observer) for _, observer in open_observers(gm)}
    return bool(kinds) and kinds.isdisjoint((PredictedRangeObserver, ChosenRangeObserver))


def range_groups(gm: GraphModule, *, any_observer: bool = True) -> dict[int, RangeGroup]:
    """The groups of a calibrated graph whose range is open, by the id of their observer.

    Pooled features and logits keep theirs: a call has few values of them, and a handful of calls
    does not show what the next one brings (`predicted_range`).
    """
    found: dict[int, RangeGroup] = {}
    for node, observer in open_observers(gm, any_observer=any_observer):
        if id(observer) in found:
            found[id(observer)].nodes.append(node)
            continue
        is_vector = type(observer) is PredictedRangeObserver and observer.is_vector
        has_hidden = getattr(observer, "ignore_at_or_below", None) is not None
        if is_vector or has_hidden or not bool(observer.min_val.isfinite().all()):
            continue
        seen = RangeCandidates(
            dtype=observer.dtype,
            qscheme=observer.qscheme,
            bins=2048,
            quant_min=observer.quant_min,
            quant_max=observer.quant_max,
            eps=float(observer.eps),
        )
        found[id(observer)] = RangeGroup(observer, [node], seen)
    return found


def qparams_over(observer: Any, ends: tuple[float, float]) -> QParams:
    """The qparams that an observer would give if it had seen other ends."""
    like = qparams_of(observer)
    is_symmetric = observer.qscheme in SYMMETRIC
    scale, zero_point = choose_qparams(
        *(torch.tensor(end, dtype=torch.float32) for end in ends),
        quant_min=like.quant_min,
        quant_max=like.quant_max,
        symmetric=is_symmetric,
        eps=torch.as_tensor(observer.eps).cpu(),
        zero_point_if_symmetric=int(like.zero_point) if is_symmetric else 0,
    )
    return QParams(
        scale=scale.reshape(-1),
        zero_point=zero_point.reshape(-1),
        quant_min=like.quant_min,
        quant_max=like.quant_max,
        dtype=like.dtype,
    )


def _differ(a: QParams, b: QParams) -> bool:
    """True if two ranges differ by more than 1 %."""
    shift = abs(float(a.zero_point) - float(b.zero_point)) / (a.quant_max - a.quant_min)
    return not 0.99 < float(a.scale) / float(b.scale) < 1.01 or shift > 0.01


Weighted = tuple[list[Any], float]
"""A call, and how many of calibration's calls it stands for."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls of the model.

    Attributes:
        fitted: those that set ranges.
        judged: those of them that ranges are judged on, the largest of all calibration's first.
        unseen: those that the choice is confirmed on.
    """

    fitted: list[list[Any]]
    judged: list[Weighted]
    unseen: list[Weighted]


def split_calls(kept: KeptCalls) -> Calls:
    """The kept calls in three parts: those that set ranges alone, that judge too, that confirm.

    Two ends are set by thousands of values in each call: it hardly flatters a range that calls
    which judge it had a part in it, while fewer calls to set it by make it worse.
    The very largest call judges, others of the largest confirm, for all of them: a range that clips
    them may look best on a sample that lacks them. The others are a sample of the rest.
    """
    used = min(MOST_USED, len(kept.sample) * 2 // 3)
    by_size = sorted(range(len(kept.sizes)), key=lambda at: -kept.sizes[at][0])
    has_sizes = len({size for size, _ in kept.sizes}) > 1
    large = by_size[: 2 * (used // LARGEST_SHARE)] if has_sizes else []
    numbers = {kept.sizes[at][1] for at in large}
    half = len(large) // 2
    rest = [kept.sample[at] for at, number in enumerate(kept.places) if number not in numbers]
    largest, others = [kept.largest[at] for at in large], rest[: used - half]
    judged = [*largest[0:half:2], *others[1::2]]
    fitted = [*largest[1:half:2], *others[0::2], *judged]
    # Candidates are set, each is judged, the choices are compared, on a call beyond the others too.
    taken = len(fitted) + len(judged) + 1 + COMPARED * (len(judged) + 1)
    room = (RUNS * kept.count - taken) // (1 + CONFIRMED) - len(largest[half:])
    confirming = rest[len(others) :][: max(room, 0 if largest else 1)]

    def weighted(largest: list[list[Any]], others: list[list[Any]]) -> list[Weighted]:
        of_large = len(large) / max(1, len(largest))
        of_others = (kept.count - len(large)) / max(1, len(others))
        return [*((c, of_large) for c in largest), *((c, of_others) for c in others)]

    return Calls(
        fitted=fitted,
        judged=weighted(largest[0:half:2], others[1::2]),
        unseen=weighted(largest[half:], confirming),
    )

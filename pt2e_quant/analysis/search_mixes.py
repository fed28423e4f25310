"""Searches the mixes of schemes of one program: weigh, choose, build, measure, choose again."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from operator import attrgetter
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.analysis.bench_mixes import Bench, Goal
from pt2e_quant.analysis.group_costs import Method, Sensitivity
from pt2e_quant.analysis.latency import Latency
from pt2e_quant.analysis.menu import (
    Cluster,
    Option,
    Uniform,
    clusters_of,
    constants_size,
    share_quantized,
)
from pt2e_quant.analysis.sensitivity import sensitivity
from pt2e_quant.analysis.solve import Candidate, least_noise, least_precision
from pt2e_quant.analysis.tuned import Choice, Point, Tuned, front_of
from pt2e_quant.backends.target.recipe_file import FLOAT, RecipeFile
from pt2e_quant.core.errors import ConfigError, Pt2eQuantError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.core.progress import show_progress
from pt2e_quant.core.provenance import provenance_of

WEIGHED = 2
"""Batches that groups are weighed on."""

_ROUNDS = 7
_STEP = 0.8
"""The share of a mix's distance from its time budget that the next mix is to make up for."""
_FIRST_NOISE = 1e-2
"""The noise over signal that a search begins with where the metric is the user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """A choice for every cluster, built and measured."""

    choice: Mapping[str, Candidate]
    recipe: RecipeFile
    metric: float
    share: float
    size: int
    label: str
    latency_us: float | None = None

    @property
    def precision(self) -> float:
        """At how many groups the recipe was given up, and how far."""
        return sum(candidate.precision for candidate in self.choice.values())


class Search:
    """The clusters of one program, and the mixes of them that were measured."""

    def __init__(
        self,
        bench: Bench,
        base: RecipeFile,
        names: Sequence[str],
        goal: Goal,
        method: str | Method,
        *,
        may_lack: bool,
    ) -> None:
        self.bench = bench
        self.base = base
        self.goal = goal
        self.notes: list[str] = []
        self.float_metric = bench.measure(None)
        self.watch = bench.stopwatch() if goal.is_of_time else None
        self.first = first = self._uniform(base, base.recipe, method)
        others = []
        for name in names:
            recipe = Option.of(name).recipe
            if may_lack and (recipe not in bench.backend.recipes or name == base.recipe):
                continue
            try:
                others.append(self._uniform(Option.of(name).throughout(base), name, method))
            except Pt2eQuantError as error:
                if not may_lack:
                    raise
                self.notes.append(f"{name} was not tried: {error.what}")
        self.of_float = self._timed(self.watch.float_gm, first.costs) if self.watch else None
        self.clusters = clusters_of(first, others, self.of_float)
        self.menu = {cluster.name: cluster.candidates for cluster in self.clusters}
        self.mixes: dict[tuple[str, ...], Mix] = {}
        self.elements = sum(r.elements for r in provenance_of(first.gm).sizes)
        self.float_size = provenance_of(first.gm).float_bytes
        in_groups = sum(options[0].size for options in self.menu.values())
        self.rest = first.size - in_groups
        """Bytes of the constants that are in no group."""

    def _uniform(self, recipe: RecipeFile, name: str, method: str | Method) -> Uniform:
        bench = self.bench
        gm = bench.build(recipe)
        weighed = [bench.picked(batch)[0] for batch in islice(bench.held, WEIGHED)]
        shown = show_progress([name], f"weighing {name}", enabled=bench.progress)
        for _ in shown:
            costs = sensitivity(
                bench.program, gm, weighed, method=method, inputs=lambda b: b, progress=False
            )
        return Uniform(name=name, gm=gm, costs=costs, latency=self._timed(gm, costs))

    def _timed(self, gm: GraphModule, costs: Sensitivity) -> Latency | None:
        """Return the latency of a graph and its groups; None if no goal needs it."""
        if self.watch is None:
            return None
        return self.watch.measure(gm, [group.group for group in costs.groups])

    def run(self, points: int) -> Mix:
        """Find the mix that meets the goal.

        Raises:
            ConfigError: no mix fits into the budget.
            UnsupportedError: no mix reaches the target.
        """
        base = self._measured({name: options[0] for name, options in self.menu.items()}, "")
        if self.goal.budget is not None:
            self._to_budget()
        elif not self.goal.is_met(base.metric, self.float_metric):
            self._to_target()
        low = sum(min(c.size for c in options) for options in self.menu.values())
        high = sum(max(c.size for c in options) for options in self.menu.values())
        for at in range(points):
            choice = least_noise(self.menu, size=low + (high - low) * (at / max(points, 1)))
            if choice is not None:
                self._measured(choice, "least noise of its size")
        return self._best()

    def _best(self) -> Mix:
        """Return the best measured mix within the budget, or the nearest to the recipe."""
        sign = -1 if self.goal.higher_is_better else 1
        mixes = self.mixes.values()
        if self.goal.budget is not None:
            fits = [mix for mix in mixes if self._cost(mix) <= self._limit()]
            if not fits:
                raise self._too_small()
            return min(fits, key=lambda mix: (sign * mix.metric, self._cost(mix)))
        meets = [mix for mix in mixes if self.goal.is_met(mix.metric, self.float_metric)]
        if not meets:
            found = min((sign * mix.metric for mix in mixes), default=math.nan) * sign
            raise UnsupportedError(
                f"no mix meets the target: the best one measured has {found:.5g}, the float "
                f"model {self.float_metric:.5g}",
                fix="a lower target, or menu=[…] with recipes of more bits",
            )
        return min(meets, key=lambda mix: (mix.precision, mix.size, sign * mix.metric))

    def _cost(self, mix: Mix) -> float:
        """Return what a mix takes of the budget: bytes of constants, or microseconds of a call."""
        if not self.goal.is_of_time:
            return mix.size
        return math.inf if mix.latency_us is None else mix.latency_us

    def _limit(self) -> float:
        """The budget, in bytes or microseconds."""
        assert self.goal.budget is not None
        unit, amount = self.goal.budget
        return amount * self.elements / 8 if unit == "bits" else amount

    def _too_small(self) -> ConfigError:
        limit, least = self._limit(), min(map(self._cost, self.mixes.values()))
        if self.goal.is_of_time:
            return ConfigError(
                f"no mix takes {limit:,.0f} us or less: the fastest measured takes {least:,.0f} us",
                fix="a larger budget, or a menu with faster recipes",
            )
        return ConfigError(
            f"no mix fits into {limit:,.0f} bytes of constants: the smallest has {least:,.0f}",
            fix="a larger budget, or a menu with recipes of fewer bits",
        )

    def _to_budget(self) -> None:
        """Choose by what the groups cost, measure the whole, choose again by how far it is off.

        Times of groups do not add up to that of a call: what runs between two groups depends on
        the schemes of both. Bytes do, but for constants that groups share.
        """
        assert self.goal.budget is not None
        unit, amount = self.goal.budget
        name = "time_us" if self.goal.is_of_time else "size"
        cost = attrgetter(name)
        limit = self._limit()
        allowed = limit - (self._unowned_us() if self.goal.is_of_time else self.rest)
        tried: list[Mapping[str, Candidate]] = []
        for _ in range(_ROUNDS):
            choice = least_noise(self.menu, **{name: allowed}) if allowed > 0 else None
            if choice is None:
                choice = {n: min(options, key=cost) for n, options in self.menu.items()}
            if choice in tried:
                break
            tried.append(choice)
            mix = self._measured(choice, f"{amount:g} {unit.removeprefix('latency_')}")
            allowed = sum(map(cost, choice.values())) + _STEP * (limit - self._cost(mix))

    def _unowned_us(self) -> float:
        """Return the time of a call with the recipe throughout that counts for no group."""
        latency = self.first.latency
        return 0.0 if latency is None else latency.call_us - sum(latency.groups.values())

    def _to_target(self) -> None:
        """Look for the noise at which the metric just meets the target."""
        noise, low, high = self._first_noise(), 0.0, math.inf
        for _ in range(_ROUNDS):
            choice = least_precision(self.menu, noise=noise)
            mix = self._measured(choice, "searched") if choice is not None else None
            if mix is not None and self.goal.is_met(mix.metric, self.float_metric):
                low = noise
            else:
                high = noise
            if low and high / low < 1.15:
                break
            noise = math.sqrt(low * high) if low and high < math.inf else 3 * low or high / 4

    def _first_noise(self) -> float:
        """Noise that is orthogonal to the signal makes a cosine of 1 / sqrt(1 + noise)."""
        target = self.goal.target
        if self.bench.metric is not None or target is None or not 0 < target < 1:
            return _FIRST_NOISE
        return 1 / target**2 - 1

    def _measured(self, choice: Mapping[str, Candidate], label: str) -> Mix:
        """Build a choice and measure it, or find it among those that were."""
        key = tuple(candidate.scheme for candidate in choice.values())
        if key not in self.mixes:
            recipe = self._recipe(choice)
            if {*key} == {FLOAT}:
                gm = self.watch.float_gm if self.watch is not None else None
                metric, share, size = self.float_metric, 0.0, self.float_size
            else:
                gm = self.first.gm if recipe == self.base else self._built(recipe)
                metric, share = self.bench.measure(gm), share_quantized(gm)
                size = constants_size(gm)
            self.mixes[key] = Mix(
                choice=choice,
                recipe=recipe,
                metric=metric,
                share=share,
                size=size,
                label=f"{self.base.recipe} throughout"
                if recipe == self.base
                else _label(key, label),
                latency_us=self._latency_us(gm),
            )
        return self.mixes[key]

    def _built(self, recipe: RecipeFile) -> GraphModule:
        """A converted graph; the float one where the groups left to quantize turn out to be none.

        An operator between others stays float where none of them is quantized.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Pt2eQuantWarning)
            return self.bench.build(recipe, strict=False)

    def _latency_us(self, gm: GraphModule | None) -> float | None:
        """Return the time of a call, if a goal needs it."""
        if self.watch is None or gm is None:
            return None
        known = {id(self.first.gm): self.first.latency, id(self.watch.float_gm): self.of_float}
        return (known.get(id(gm)) or self.watch.measure(gm)).call_us

    def _recipe(self, choice: Mapping[str, Candidate]) -> RecipeFile:
        rules = [
            rule
            for cluster in self.clusters
            if (candidate := choice[cluster.name]) is not cluster.candidates[0]
            for rule in cluster.rules(candidate.scheme, self._why(cluster, candidate))
        ]
        return replace(self.base, rules=(*self.base.rules, *rules))

    def _why(self, cluster: Cluster, candidate: Candidate) -> str:
        base = cluster.candidates[0]
        if candidate is base and base.scheme == FLOAT:
            return f"{self.base.recipe} does not quantize it"
        if candidate is base:
            return f"{base.scheme} costs {base.noise:.2g} of the signal"
        text = (
            f"{base.scheme} would cost {base.noise:.2g} of the signal, this {candidate.noise:.2g}"
        )
        saved = base.size - candidate.size
        return f"{text}; {saved:,.0f} bytes less" if saved > 0 else text

    def graph_of(self, mix: Mix) -> GraphModule:
        """The converted graph of a mix."""
        if mix.share == 0.0:
            met, less = ("target", "lower") if self.goal.budget is None else ("budget", "smaller")
            raise UnsupportedError(
                f"the float model is the best that meets the {met}: nothing would be quantized",
                fix=f"a {less} {met}, or another menu=[…]",
            )
        return self.bench.build(mix.recipe)

    def result(self, best: Mix, artifact: Any) -> Tuned:
        """All that was found."""
        measured = tuple(
            Point(
                label=mix.label,
                metric=mix.metric,
                size=mix.size,
                share_quantized=mix.share,
                recipe=mix.recipe,
                latency_us=mix.latency_us,
                given_up=mix.precision if self.goal.budget is None else 0.0,
            )
            for mix in self.mixes.values()
        )
        return Tuned(
            artifact=artifact,
            recipe=best.recipe,
            metric=best.metric,
            latency_us=best.latency_us,
            float_metric=self.float_metric,
            share_quantized=best.share,
            front=front_of(measured, higher_is_better=self.goal.higher_is_better),
            measured=measured,
            choices=tuple(self._choices(best)),
            notes=tuple(self.notes),
        )

    def _choices(self, best: Mix) -> Iterable[Choice]:
        for cluster in self.clusters:
            candidate = best.choice[cluster.name]
            for group in cluster.groups:
                own = cluster.nodes.get(group.group, (candidate.scheme,))
                yield Choice(
                    group=group.group,
                    module=group.module,
                    operator=group.operator,
                    scheme=candidate.scheme if candidate.scheme in own else FLOAT,
                    tied=tuple(g.group for g in cluster.groups if g is not group),
                    noise={c.scheme: c.noise for c in cluster.candidates},
                    why=self._why(cluster, candidate),
                )


def _label(schemes: Sequence[str], fallback: str) -> str:
    """The schemes of a mix with how many clusters have each."""
    counts = {scheme: schemes.count(scheme) for scheme in dict.fromkeys(schemes)}
    if len(counts) == 1:
        return f"{next(iter(counts))} throughout"
    listed = ", ".join(f"{count} {scheme}" for scheme, count in counts.items())
    return f"{fallback}: {listed}"

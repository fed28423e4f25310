"""Builds mixes of schemes and measures them; what a search is asked for."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from pt2e_quant.analysis.latency import Stopwatch
from pt2e_quant.analysis.menu import Option
from pt2e_quant.analysis.metric import Metric, MetricSum, Picker
from pt2e_quant.backends.artifact import result_builder
from pt2e_quant.backends.target.backend import Backend
from pt2e_quant.backends.target.recipe_file import FLOAT, RecipeFile
from pt2e_quant.core.errors import ConfigError, Pt2eQuantWarning
from pt2e_quant.core.read_capture import call_graph, capture_of
from pt2e_quant.core.unlift import graph_module_of
from pt2e_quant.flow.calibrate.calibrate import calibrate, preserve_buffers
from pt2e_quant.flow.calibrate.pick_inputs import as_call, bind_batch
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e

LATENCY = "latency_us"
"""The unit of a budget of time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of a search: a metric, a fall of it, or a budget."""

    target: float | None
    drop: float | None
    budget: tuple[str, float] | None
    higher_is_better: bool

    @classmethod
    def of(
        cls,
        target: float | None,
        drop: float | None,
        budget: Mapping[str, float] | None,
        higher_is_better: bool,
    ) -> "Goal":
        """Make the goal of the arguments of `tune`.

        Raises:
            ConfigError: not exactly one is given, the budget is of something else, or a number is
                none that can be asked for.
        """
        given = [value for value in (target, drop, budget) if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"tune takes one of target, accuracy_drop and budget, found {len(given)}",
                fix='tune(…, target=0.999), or budget={"bytes": 4_000_000}',
            )
        pair = None
        if budget is not None:
            if len(budget) != 1 or not {*budget} <= {"bytes", "bits", LATENCY}:
                raise ConfigError(
                    f"a budget is of bytes, of bits or of {LATENCY}, found {dict(budget)}",
                    fix='budget={"bytes": 4_000_000}, {"bits": 6} or {"latency_us": 900}',
                )
            pair = next(iter(budget.items()))
        for name, value, least in (("target", target, -math.inf), ("accuracy_drop", drop, 0.0)):
            if value is not None and not (math.isfinite(value) and value >= least):
                raise ConfigError(f"{name}={value} is nothing to reach", fix=f"a finite {name}")
        if pair is not None and not (math.isfinite(pair[1]) and pair[1] > 0):
            raise ConfigError(
                f"a budget is a finite number above 0, found {dict([pair])}",
                fix='budget={"bytes": 4_000_000}',
            )
        return cls(target=target, drop=drop, budget=pair, higher_is_better=higher_is_better)

    @property
    def is_of_time(self) -> bool:
        """True if it is a budget of time."""
        return self.budget is not None and self.budget[0] == LATENCY

    def is_met(self, metric: float, of_float: float) -> bool:
        """True if a metric is good enough."""
        sign = 1 if self.higher_is_better else -1
        least = self.target if self.target is not None else of_float - sign * (self.drop or 0.0)
        return sign * metric >= sign * least


class Bench:
    """Builds mixes and measures them."""

    def __init__(
        self,
        program: ExportedProgram,
        backend: Backend,
        data: Iterable[Any],
        held: Iterable[Any],
        picked: Picker,
        metric: Metric | None,
        progress: bool,
    ) -> None:
        self.program = program
        self.backend = backend
        # A loader that shuffles or augments gives other batches each time.
        self.held = list(held)
        self.data = self.held if data is held else data
        self.picked = picked
        self.metric = metric
        self.progress = progress
        module: Any = graph_module_of(program)
        self.expected = [self._outputs(module, batch) for batch in self.held]
        if not self.expected:
            raise ConfigError("there is no batch to measure on", fix="give at least one batch")

    def stopwatch(self) -> Stopwatch:
        """Times converted graphs on the first batch of the data that is measured on."""
        every = Option.of(FLOAT).throughout(RecipeFile(backend=self.backend.name))
        with warnings.catch_warnings():  # that nothing is quantized is what is asked for
            warnings.simplefilter("ignore", Pt2eQuantWarning)
            float_gm = self.build(every, strict=False)
        return Stopwatch(self.backend, as_call(self.picked(self.held[0])[0]), float_gm)

    def build(self, recipe: RecipeFile, *, strict: bool = True) -> GraphModule:
        """A converted graph; without `strict` also one of which nothing is quantized."""
        prepared = prepare_pt2e(self.program, recipe.quantizer(self.backend), strict=strict)
        calibrate(prepared, map(self.picked.inputs_of, self.data), progress=False)
        return convert_pt2e(prepared, progress=False)

    def measure(self, gm: GraphModule | None) -> float:
        """The metric of a converted graph; of the float model for None."""
        build = result_builder(capture_of(gm).out_spec) if gm is not None else None
        total = MetricSum(self.metric if self.metric is not None else mean_cosine)
        for batch, expected in zip(self.held, self.expected, strict=True):
            found = expected if gm is None else self._outputs(gm, batch)
            if self.metric is None:
                total.add(found, expected)
            else:
                made = build(found) if build is not None else self._built(found)
                total.add(made, self.picked(batch)[1])
        return total.value()

    def _built(self, leaves: Sequence[Any]) -> Any:
        return pytree.tree_unflatten(list(leaves), self.program.call_spec.out_spec)

    def _outputs(self, gm: GraphModule, batch: Any) -> list[Any]:
        """The leaves of the results of one batch."""
        capture = capture_of(gm)
        leaves = bind_batch(capture, self.picked(batch)[0], call="tune")
        with torch.no_grad(), preserve_buffers(gm, capture):
            found = call_graph(gm, capture, leaves)
        return pytree.tree_leaves(found, is_leaf=lambda value: value is None)


def mean_cosine(found: Any, expected: Any) -> float:
    """The mean over samples of the cosine between two results, all float tensors together."""
    pairs = [
        (a.double().reshape(len(a) if a.dim() else 1, -1), b.double())
        for a, b in zip(pytree.tree_leaves(expected), pytree.tree_leaves(found), strict=True)
        if isinstance(a, Tensor) and a.is_floating_point()
    ]
    cosines = [torch.cosine_similarity(a, b.reshape(a.shape), dim=1).mean() for a, b in pairs]
    return float(torch.stack(cosines).mean()) if cosines else math.nan

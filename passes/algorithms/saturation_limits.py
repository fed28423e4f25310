"""Leave out of ranges the values that the functions behind a tensor do not tell apart."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import OUT, STEPS_KEY, AlgorithmGraph
from pt2e_quant.passes.algorithms.functions_behind import Functions, functions_behind
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.range_groups import open_observers

POINTS = 4097
"""Of the observed range, at which functions are computed."""
TOLERANCE = 0.25
"""Steps of a function's quantized output by which it may change beyond an end of the range."""
LEAST_GAIN = 0.02
"""The part of a range that has to be left out."""

NARROWED_KEY = "pt2e_quant.narrowed"
"""The key of an observer node's `meta`: a `Narrowed`."""


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Of a range that an algorithm made narrower, because what reads the tensor lets it.

    Args:
        observed: (min, max) that calibration saw.
        read: (least, greatest) value that its readers tell apart from those beyond.
    """

    observed: tuple[float, float]
    read: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaturationLimits(Algorithm):
    """Leave out of a range the values that the functions behind a tensor do not tell apart.

    Below -3 hardswish is 0, and SiLU, GELU and sigmoid change by less than a step of their
    quantized output below some value. Steps spent there are lost to the values above it: of a
    convolution's output between -12 and 12 in front of a SiLU, a fourth of the integers. All that
    is computed from the tensor alone counts, x * sigmoid(x) too; a function whose result stays
    float has to be constant.

    Before:  hardswish(observe(x)),  x in -14 .. 13
    After:   hardswish(observe(x)),  range -3 .. 13

    Args:
        any_observer: also where somebody chose the observer.
    """

    name: ClassVar[str] = "saturation_limits"
    paper: ClassVar[str] = "none: values that a function maps to one have one integer"
    fits: ClassVar[str] = "activations with calibrated (static) integers that functions alone read"
    stage: ClassVar[Stage] = Stage.RANGES

    any_observer: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The tensors that nothing but functions of one element reads."""
        places = {node: index for index, node in enumerate(graph.gm.graph.nodes)}
        opened = list(open_observers(graph.gm, any_observer=self.any_observer))
        sharing = Counter(id(observer) for _, observer in opened)
        for node, observer in opened:
            if sharing[id(observer)] == 1 and hasattr(observer, "set_extremes"):
                found = functions_behind(graph, node, places)
                if found is not None:
                    yield Site(graph, node.all_input_nodes[0], OUT, found)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Narrow one range."""
        functions: Functions = site.plan
        observer = site.graph.observer(functions.start)
        low, high = float(observer.min_val), float(observer.max_val)
        if not low < high or abs(low) == float("inf") or getattr(observer, "is_vector", False):
            raise Declined("its range is not that of a map of values")
        seen = low, high
        low, high = min(low, 0.0), max(high, 0.0)
        x = torch.linspace(low, high, POINTS, dtype=torch.float32)
        ends = limits(x, _results(site.graph, functions, x))
        # One step more on each side: the zero point, an integer, moves both ends by half a step.
        step = (ends[1] - ends[0]) / (observer.quant_max - observer.quant_min)
        ends = max(low, ends[0] - step), min(high, ends[1] + step)
        if ends[1] - ends[0] > (1 - LEAST_GAIN) * (high - low):
            raise Declined("the functions behind it tell all its values apart")
        observer.set_extremes(*(observer.min_val.new_tensor([end]) for end in ends))
        told = f"{self.name}: {low:.3g} .. {high:.3g} narrowed to {ends[0]:.3g} .. {ends[1]:.3g}"
        functions.start.meta[NARROWED_KEY] = Narrowed(seen, ends)
        functions.start.meta.setdefault(STEPS_KEY, []).append(told)
        return told


def limits(x: Tensor, results: Iterable[tuple[Tensor, float]]) -> tuple[float, float]:
    """The least range of x beyond which no function changes by more than its tolerance; holds 0."""
    lower = upper = torch.ones_like(x, dtype=torch.bool)
    for values, tolerance in results:
        lower = lower & _is_level(values, tolerance)
        upper = upper & _is_level(values.flip(0), tolerance).flip(0)
    low = float(x[int(lower.nonzero().max())])
    high = float(x[int(upper.nonzero().min())])
    return min(low, 0.0), max(high, 0.0)


def _is_level(values: Tensor, tolerance: float) -> Tensor:
    """A mask of the places up to which the function is constant within a tolerance."""
    most, least = values.cummax(0).values - values, values - values.cummin(0).values
    return torch.maximum(most, least) <= tolerance


def _results(graph: AlgorithmGraph, functions: Functions, x: Tensor) -> list[tuple[Tensor, float]]:
    """Return the results of the functions for values x, and the change allowed to each."""
    known = functions.values(graph, x, lambda _, value: value)
    return [(known[n].double(), _tolerance(graph, n, known[n])) for n in functions.results]


def _tolerance(graph: AlgorithmGraph, node: Node, values: Tensor) -> float:
    """By how much a result may change; one that is read in float, by nothing but rounding."""
    observer = graph.observer(node)
    is_seen = observer is not None and bool(getattr(observer, "min_val", values).isfinite().all())
    if not is_seen or getattr(observer, "is_dynamic", False) or observer.dtype.is_floating_point:
        return 1e-7 * float(values.abs().max())
    return TOLERANCE * float(qparams_of(observer).scale.max())

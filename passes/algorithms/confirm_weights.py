"""Hold what algorithms made of weights against plain rounding, in the whole model."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import STEPS_KEY, AlgorithmGraph
from pt2e_quant.passes.algorithms.bias_correction import LAYERS
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.observed_run import (
    exact_run,
    output_errors_of,
    rounded_run,
)

LEAST_GAIN_DB = 0.1
"""The least gain in dB that keeps the chosen weights. The algorithms lower the error of each layer,
so a gain is likely before it is measured: one within its standard error counts too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfirmWeights(Algorithm):
    """Take back what algorithms made of weights and biases unless the whole model gains by it.

    Algorithms of integers and corrections choose layer by layer. What is best for each layer need
    not be for the model. The kept calls of calibration are run in float, with all rounded plainly,
    and with all rounded as the algorithms left it. Their change stays where the outputs come
    nearer to the float ones.
    """

    name: ClassVar[str] = "confirm_weights"
    paper: ClassVar[str] = "none: a check of what the algorithms before it did"
    fits: ClassVar[str] = "models with weights in integers that other algorithms have changed"
    stage: ClassVar[Stage] = Stage.CONFIRMATION
    needs_calls: ClassVar[bool] = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One for the whole graph, at its first layer."""
        return [Site(graph, node, "weights") for node in graph.quantized(LAYERS)[:1]]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Compare, and take back what does not help."""
        graph, gathered = site.graph, site.graph.gathered
        if not gathered.floats:
            raise Declined("no weight or bias differs from the float model's")
        if gathered.kept is None or not gathered.kept.sample:
            raise Declined("no calibration data reached it")
        calls, gm = gathered.kept.sample, graph.gm
        exact = exact_run(gm, gathered.floats)
        plain = rounded_run(gm, gathered.floats, gathered.observers)
        changed = rounded_run(gm, {}, {})
        with torch.no_grad():
            before, after = output_errors_of(
                exact, (plain, changed), calls, progress=gathered.progress
            )
        told = (
            f"on {len(calls)} calls the quantized model is at {after.db:.1f} dB with the weights "
            f"and biases that algorithms chose, and at {before.db:.1f} dB with plain rounding"
        )
        if after.db >= before.db + LEAST_GAIN_DB:
            return f"weights are as chosen: {told}"
        _take_back(graph)
        raise Declined(f"weights are rounded plainly: {told}")


def _take_back(graph: AlgorithmGraph) -> None:
    """Give constants and their observers back what they were, and say so in their records."""
    for node, value in graph.gathered.floats.items():
        (reader,) = node.users
        reader.replace_input_with(node, graph.editor.rebind(node, value, reader=reader))
        if STEPS_KEY in reader.meta:
            reader.meta[STEPS_KEY].append(f"{ConfirmWeights.name}: rounded plainly again")
    for observed, observer in graph.gathered.observers.items():
        graph.put_observer(observed, observer)
    graph.gathered.floats.clear()

"""Quantize the outlier channels of a linear's output on steps of their own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.channel_statistics import ChannelStatistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import OUT, AlgorithmGraph, is_static_per_tensor
from pt2e_quant.passes.algorithms.channel_scales import choose_channel_scale
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.scale_targets import (
    OUTPUT_FACTORS_KEY,
    linear_behind,
    multiply,
    note_factors,
    rows_of,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleOutputs(Algorithm):
    """Divide a linear's rows by a scale per channel, and multiply its dequantized output by it.

    At outputs that are read in float. The rows' own weight scales absorb the division, so only the
    output's rounding changes. A relu between the linear and its quantize may stay: relu(y / s) * s
    is relu(y) for s > 0. The scale is chosen from calibration statistics alone (`channel_scales`).

    Before:  z = observe(linear(x, w, b))
    After:   z = observe(linear(x, w / s, b / s)) * s

    Args:
        least_gain: by what factor the error must fall for a multiplication at run time.
    """

    name: ClassVar[str] = "scale_outputs"
    paper: ClassVar[str] = "the scales of Xiao et al. 2023, SmoothQuant, at outputs"
    fits: ClassVar[str] = "linears whose outputs have calibrated (static) integers per tensor"

    least_gain: float = 2.0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One per static per-tensor observer of a linear's output: the tensor it observes."""
        for node in graph.gm.graph.find_nodes(op="call_module"):
            source = node.all_input_nodes[0] if node.all_input_nodes else node
            if is_static_per_tensor(graph.observer(node)) and linear_behind(source) is not None:
                yield Site(graph, source, OUT)

    def statistics(self, site: Site) -> Statistics:
        """The channels of the output."""
        return ChannelStatistics()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Scale one output."""
        graph, linear = site.graph, linear_behind(site.node)
        observed = next(iter(site.node.users))
        if linear is None or len(linear.users) > 1 or len(site.node.users) > 1:
            raise Declined(f"{site.node.name} has other readers")
        graph.check_range(observed)
        reader = next((user for user in observed.users if Q_ANNOTATION_KEY in user.meta), None)
        if reader is not None:
            raise Declined(f"{reader.name} reads it in integers")
        rows = rows_of(graph, linear)
        if not isinstance(statistics, ChannelStatistics):
            raise Declined("the calibrated tensors differ in their last axis, or there were none")
        choice = choose_channel_scale(statistics, least_gain=self.least_gain)
        choice = choice.exact_in(observed.meta["val"].dtype)
        rows.divide(choice.factors)
        for node in {linear, site.node}:
            note_factors(node, OUTPUT_FACTORS_KEY, choice.factors)
        readers = list(observed.users)
        multiply(
            graph,
            observed,
            choice.factors,
            readers=readers,
            like=linear,
            name="output_scale",
            by=self.name,
        )
        graph.scale_range(observed, statistics, 1 / choice.factors, choice.step)
        return choice.step

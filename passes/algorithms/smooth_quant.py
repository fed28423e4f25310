"""SmoothQuant: move outlier channels of a linear's input into its weight."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.fx import Node

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.recurrent_ops import RecurrentLayer, Rounding
from pt2e_quant.graph.ops import LINEAR, argument, is_call, layer_operands
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.channel_statistics import ChannelStatistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import (
    AlgorithmGraph,
    is_quantized_output,
    is_static_per_tensor,
)
from pt2e_quant.passes.algorithms.channel_scales import (
    EXPONENTS,
    QUANTILES,
    candidates_of,
    choose_channel_scale,
)
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.scale_targets import Rows, divide_inputs, fold_target
from pt2e_quant.passes.recurrent.round_recurrent import rounding_of


@dataclass(frozen=True, slots=True, kw_only=True)
class SmoothQuant(Algorithm):
    """Divide a linear's input by a scale per channel, and multiply its weight by it.

    The scale is max(absmax, quantile) ** alpha of each channel, where alpha and the quantile are
    for each input those of the settings with the least error expected from calibration statistics
    (`channel_scales`). One alpha and the quantile 0 leave the paper's scale of activations. The
    scale goes into the norm, the constant factor or the linear that makes the input where nothing
    else reads that, else it is a multiplication of its own.

    Before:  y = linear(observe(x), w)
    After:   y = linear(observe(x * (1 / s)), w * s)

    The same for what a recurrent layer reads in every step, whose range is found at run time: its
    weight for that has integers, whose steps the largest of its columns sets. Features such as
    powers of a spectrum differ by orders of magnitude.

    Args:
        alphas: migration strengths that are tried, above 0 and at most 1.
        quantiles: of the channels' magnitudes, at least 0 and below 1: channels below one share
            its scale.
        least_gain: by what factor the error must fall for a multiplication at run time.
        least_gain_folded: the same where the scale goes into a constant that is there anyway.
    """

    name: ClassVar[str] = "smooth_quant"
    paper: ClassVar[str] = "Xiao et al. 2023, SmoothQuant, arXiv 2211.10438"
    fits: ClassVar[str] = (
        "linears whose inputs have calibrated (static) integers per tensor, and recurrent layers"
    )

    alphas: tuple[float, ...] = EXPONENTS
    quantiles: tuple[float, ...] = QUANTILES
    least_gain: float = 1.5
    least_gain_folded: float = 1.1

    def __post_init__(self) -> None:
        """Refuse strengths and quantiles out of range."""
        are_alphas = self.alphas and all(0 < alpha <= 1 for alpha in self.alphas)
        if not are_alphas or not self.quantiles or not all(0 <= q < 1 for q in self.quantiles):
            raise ConfigError(
                f"smooth_quant tries alphas in (0, 1] and quantiles in [0, 1), found {self.alphas} "
                f"and {self.quantiles}",
                fix="SmoothQuant(alphas=(0.5,), quantiles=(0.0,))",
            )

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The first of the linears that read an observer, or of the layers that read a tensor."""
        seen: set[Node] = set()
        for layer in graph.quantized((RecurrentLayer,)):
            x, _ = layer_operands(layer)
            if x not in seen:
                seen.add(x)
                yield Site(graph, layer, "x")
        for linear in graph.calls(LINEAR):
            observed = argument(linear, "input")
            if observed not in seen and is_static_per_tensor(graph.observer(observed)):
                seen.add(observed)
                yield Site(graph, linear, "input")

    def statistics(self, site: Site) -> Statistics:
        """The channels of the input."""
        return ChannelStatistics()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Scale the input of all linears that read this observer, or of all recurrent layers."""
        if not isinstance(statistics, ChannelStatistics):
            raise Declined("the calibrated tensors differ in their last axis, or there were none")
        if site.node.target is RecurrentLayer:
            return self._scale_steps(site, statistics)
        graph, observed = site.graph, argument(site.node, "input")
        source = observed.all_input_nodes[0]
        linears = list(observed.users)
        if any(not is_call(n, LINEAR) or argument(n, "input") is not observed for n in linears):
            raise Declined("it is read by more than linears")
        graph.check_range(observed)
        target = fold_target(graph, source, [observed])
        if not isinstance(target, Rows) and is_quantized_output(source):
            raise Declined(f"{source.name} is computed in integers")
        weights = [graph.constant(linear, "weight").value for linear in linears]
        choice = choose_channel_scale(
            statistics,
            weight=torch.cat([w.float() for w in weights]),
            least_gain=self.least_gain if isinstance(target, str) else self.least_gain_folded,
            candidates=candidates_of(self.alphas, self.quantiles),
        )
        choice = choice.exact_in(source.meta["val"].dtype)
        divide_inputs(graph, target, choice.factors, source=source, linears=linears, by=self.name)
        graph.scale_range(observed, statistics, 1 / choice.factors, choice.step)
        return choice.step

    def _scale_steps(self, site: Site, statistics: ChannelStatistics) -> str:
        """Scale what the recurrent layers of both directions read."""
        graph, (source, _) = site.graph, layer_operands(site.node)
        layers = [n for n in source.users if n.target is RecurrentLayer and n.args[0] is source]
        weights = [graph.constant(layer, "w_ih").value for layer in layers]
        choice = choose_channel_scale(
            statistics,
            weight=torch.cat([w.float() for w in weights]),
            least_gain=self.least_gain,
            candidates=candidates_of(self.alphas, self.quantiles),
            is_rounded=rounding_of(site.node) is not Rounding.NONE,
        )
        reason = "a multiplication costs little beside a recurrent layer"
        divide_inputs(graph, reason, choice.factors, source=source, linears=layers, by=self.name)
        return choice.step

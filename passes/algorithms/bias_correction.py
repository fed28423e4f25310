"""Bias correction: take the mean error that quantization makes off the bias."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.graph.ops import (
    CONV,
    CONV_TRANSPOSE,
    LINEAR,
    RELU,
    RELU6,
    argument,
    is_call,
)
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, unobserved
from pt2e_quant.passes.algorithms.functions_behind import Functions, functions_behind
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.paired_run import Pair, round_through
from pt2e_quant.passes.algorithms.range_groups import is_chosen
from pt2e_quant.passes.algorithms.scale_targets import columns_of

LAYERS = (*LINEAR, *CONV, *CONV_TRANSPOSE)
LEAST_SAMPLES = 8
"""That recipes ask for: of fewer, means and their variances are known badly."""
LEAST_GAINING = 0.5
"""The share of positions that have to gain by a correction."""
LEAST_SLOPE = 0.05
"""Of a function behind a layer, in the mean of a channel: with less, a bias moves nothing."""


def channels_first(node: Node, value: Tensor) -> Tensor:
    """The output of a layer in one call as float64[samples, channels, positions]."""
    value = value.double()
    if is_call(node, LINEAR):
        value = value.reshape(1, -1) if value.dim() == 1 else value
        return value.reshape(len(value), -1, value.shape[-1]).transpose(1, 2)
    rank = argument(node, "weight").meta["val"].dim()
    value = value if value.dim() == rank else value[None]
    return value.flatten(2)


@dataclass(frozen=True, slots=True, kw_only=True)
class BiasCorrection(Algorithm):
    """Take off each bias the mean error of its channel, layer by layer in graph order.

    The error is that of the layer's output with all layers before it quantized and corrected
    (appendix D of the paper). Where functions of one element alone read the output, it is the mean
    error behind them which is taken off, by their slope: a relu passes no error of what is below
    zero on, and where a maximum is behind a leaky relu, ranges leave out what it does not pass on.

    An error that a few positions alone have (a token with huge values) is not that of the others:
    where less mean error would be more error at most positions, the bias stays.

    A channel's mean over few samples is uncertain. It is taken by the part S / (S + V): V is the
    variance of the mean, and S what the square of a mean is beyond V, on average over the layer's
    channels (an empirical Bayes estimate, after James and Stein 1961).

    Before:  conv(x, w, b)
    After:   conv(x, w, b - E[conv(x_quantized, w_quantized, b) - conv(x, w, b)])

    Args:
        shrinks: take the uncertainty of means into account.
        least_samples: of the kept calls together; fewer leave biases as they are.
        any_observer: also where somebody chose the observers of activations.
    """

    name: ClassVar[str] = "bias_correction"
    paper: ClassVar[str] = "Nagel et al. 2019, Data-free quantization, arXiv 1906.04721"
    fits: ClassVar[str] = "linears and convolutions with weights in integers and a bias"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True

    shrinks: bool = True
    least_samples: int = 1
    any_observer: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The bias of every quantized layer."""
        if not self.any_observer and is_chosen(graph.gm):
            return []
        layers = [n for n in graph.quantized(LAYERS) if argument(n, "bias") is not None]
        kept = graph.gathered.kept
        if kept is not None and (count := _samples(kept)) < self.least_samples:
            few = Declined(
                f"biases are as they are: mean errors need {self.least_samples} samples, the kept "
                f"calls have {count}"
            )
            return [Site(graph, layer, "bias", few) for layer in layers[:1]]
        places = {node: index for index, node in enumerate(graph.gm.graph.nodes)}
        return [Site(graph, n, "bias", functions_behind(graph, n, places)) for n in layers]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Correct one bias."""
        bias = site.graph.constant(site.node, "bias")
        rounded = next(site.graph.run.operands(argument(site.node, "bias"))).rounded
        behind = _Behind(site.graph, site.plan, rounded.double() - bias.value.double())
        pairs = list(site.graph.run.outputs(site.node))
        found = [behind.error(site.node, pair) for pair in pairs]
        errors, slopes = (torch.cat(parts) for parts in zip(*found, strict=True))
        slope = slopes.mean(0)
        errors = torch.where(slope < LEAST_SLOPE, 0.0, errors / slope.clamp(min=LEAST_SLOPE))
        shift = errors.mean(0)
        if self.shrinks and len(errors) > 1:
            shift = shift * certain_part(shift, errors.var(0) / len(errors))
        if not float(shift.abs().max()) > 0:
            raise Declined("no channel has a mean error beyond its uncertainty")
        share = float(torch.cat([behind.gains(site.node, pair, shift) for pair in pairs]).mean())
        if share < LEAST_GAINING:
            raise Declined(
                f"less mean error would be more error at {1 - share:.0%} of the positions: it is "
                "that of a few"
            )
        bias.set(bias.value.double() - shift)
        step = f"{self.name}: moved by {float(shift.abs().max()):.3g} at most"
        bias.note(step)
        return step


def _samples(kept: KeptCalls) -> int:
    """Count the samples of the kept calls, by the first axis of their inputs."""
    sizes = ([len(x) for x in call if isinstance(x, Tensor) and x.dim()] for call in kept.sample)
    return sum(max(found, default=1) for found in sizes)


def certain_part(means: Tensor, variances: Tensor) -> Tensor:
    """By how much means are to be trusted, 0 to 1 each.

    Args:
        means: as estimated, of one kind.
        variances: of the estimates.
    """
    true = (means.square() - variances).mean().clamp(min=0.0)
    total = true + variances
    return torch.where(total > 0, true / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)


@dataclass(frozen=True, slots=True)
class _Behind:
    """What is computed from a layer's output alone.

    Args:
        graph: the algorithm's.
        functions: None where the output is read as it is.
        of_bias: the rounding error of the bias itself, [channels]: convert sees to it, and widens
            the weight's scale where int32 does not hold the bias.
    """

    graph: AlgorithmGraph
    functions: Functions | None
    of_bias: Tensor

    def error(self, layer: Node, pair: Pair) -> tuple[Tensor, Tensor]:
        """The mean error of each channel in each sample, and what a shift of it makes of that.

        Both are [samples, channels].
        """
        exact, found = self._outputs(layer, pair)
        if self.functions is None:
            errors = (found - exact).mean(2)
            return errors, torch.ones_like(errors)
        with torch.enable_grad():
            found = found.detach().requires_grad_()
            made = self._results(found, pair)
            (slopes,) = torch.autograd.grad(made.sum(), found)
        errors = made.detach() - self._results(exact)
        return errors.mean(2), slopes.mean(2) * found.shape[2] / made.shape[2]

    def gains(self, layer: Node, pair: Pair, shift: Tensor) -> Tensor:
        """Return 1 where a shift lowers the error of a position, 0 where it raises it, else 0.5."""
        exact, found = self._outputs(layer, pair)
        moved = self._results(found - shift[:, None], pair)
        exact, found = self._results(exact), self._results(found, pair)
        before, after = ((value - exact).square().sum(1) for value in (found, moved))
        return ((before - after).sign() + 1).flatten() / 2

    def _outputs(self, layer: Node, pair: Pair) -> tuple[Tensor, Tensor]:
        """Return the layer's output, in float and quantized."""
        found = channels_first(layer, pair.rounded) - self.of_bias[:, None]
        return channels_first(layer, pair.exact), found

    def _results(self, output: Tensor, rounds: Pair | None = None) -> Tensor:
        """The results of the functions, one after another along the positions.

        Args:
            output: of the layer, as float64[samples, channels, positions].
            rounds: the pair whose rounded value it is, None for the exact one.
        """
        if self.functions is None:
            return output

        def through(observer: Any, value: Tensor) -> Tensor:
            if rounds is None:
                return value
            made: Tensor = round_through(observer, value.to(rounds.rounded.dtype))
            return made.double()

        known = self.functions.values(self.graph, output, through)
        # Without their own rounding, whose error no bias takes off.
        results = dict.fromkeys(map(unobserved, self.functions.results))
        return torch.cat([known[node].double() for node in results], dim=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyticBiasCorrection(Algorithm):
    """Bias correction without data, where a folded batch norm tells the mean of a layer's input.

    The input of channel j is relu(N(beta_j, gamma_j)), or relu6 of it, or the normal itself
    (section 4.2.1): its mean times the rounding error of the weight is the mean error.

    Before:  conv(x, w, b)
    After:   conv(x, w, b - (w_quantized - w) E[x])
    """

    name: ClassVar[str] = "analytic_bias_correction"
    paper: ClassVar[str] = "Nagel et al. 2019, Data-free quantization, arXiv 1906.04721"
    fits: ClassVar[str] = (
        "layers with weights in integers and a bias, behind a layer with a folded batch norm"
    )
    stage: ClassVar[Stage] = Stage.CORRECTIONS

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The bias of every quantized layer whose input has known moments."""
        layers = (n for n in graph.quantized(LAYERS) if not is_call(n, CONV_TRANSPOSE))
        for node in layers:
            mean = input_mean(graph, node)
            if mean is not None and argument(node, "bias") is not None:
                yield Site(graph, node, "bias", mean)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Correct one bias."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        bias, value = site.graph.constant(site.node, "bias"), weight.value
        floats = site.graph.gathered.floats
        exact = floats.get(weight.node, value).double()
        error = weight.grid().nearest(value.float()).double() - exact
        product = error * columns_of(site.plan, site.node)
        shift = product.flatten(1).sum(1)
        # What was taken off before for the same error is not taken off twice.
        bias.set(floats.get(bias.node, bias.value).double() - shift)
        step = f"{self.name}: moved by {float(shift.abs().max()):.3g} at most"
        bias.note(step)
        return step


def input_mean(graph: AlgorithmGraph, node: Node) -> Tensor | None:
    """E[x] of each input channel of a layer by the batch norm before it, None if none is known."""
    source, between = graph.source(node), None
    if is_call(source, (*RELU, *RELU6)):
        between, source = source, unobserved(source.all_input_nodes[0])
    moments: OutputMoments | None = source.meta.get(OUTPUT_MOMENTS_KEY)
    if moments is None:
        return None
    if between is None:
        return moments.mean
    high = 6.0 if is_call(between, RELU6) else math.inf
    return clipped_mean(moments, 0.0, high)


def clipped_mean(moments: OutputMoments, low: float, high: float) -> Tensor:
    """The mean of a normal variable clamped to low .. high (appendix C of the paper)."""
    mean, deviation = moments.mean.double(), moments.deviation.double().clamp(min=1e-12)
    a, b = (low - mean) / deviation, (high - mean) / deviation

    def density(z: Tensor) -> Tensor:
        return (-z.square() / 2).exp() / math.sqrt(2 * math.pi)

    below, under = torch.special.ndtr(a), torch.special.ndtr(b)
    found: Tensor = mean * (under - below) + deviation * (density(a) - density(b)) + low * below
    return found if high == math.inf else found + high * (1 - under)

"""Bias correction: take the mean error that quantization makes off the bias."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.graph.ops import CONV, CONV_TRANSPOSE, LINEAR, RELU, RELU6, argument, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, unobserved
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.paired_run import Pair
from pt2e_quant.passes.algorithms.scale_targets import columns_of

LAYERS = (*LINEAR, *CONV, *CONV_TRANSPOSE)


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
    (appendix D of the paper). A channel's mean over few samples is uncertain: it is taken by the
    part that its variance over samples leaves, 1 - variance / (samples * mean ** 2).

    Before:  conv(x, w, b)
    After:   conv(x, w, b - E[conv(x_quantized, w_quantized, b) - conv(x, w, b)])

    Args:
        shrinks: take the uncertainty of means into account.
    """

    name: ClassVar[str] = "bias_correction"
    paper: ClassVar[str] = "Nagel et al. 2019, Data-free quantization, arXiv 1906.04721"
    fits: ClassVar[str] = "linears and convolutions with weights in integers and a bias"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True

    shrinks: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The bias of every quantized layer."""
        layers = graph.quantized(LAYERS)
        return [Site(graph, n, "bias") for n in layers if argument(n, "bias") is not None]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Correct one bias."""
        bias = site.graph.constant(site.node, "bias")
        errors = torch.cat([_means(site.node, pair) for pair in site.graph.run.outputs(site.node)])
        shift = errors.mean(0)
        if self.shrinks and len(errors) > 1:
            uncertain = errors.var(0) / len(errors)
            tiny = torch.finfo(torch.float64).tiny
            shift = shift * (1 - uncertain / shift.square().clamp(min=tiny)).clamp(min=0.0)
        if not float(shift.abs().max()) > 0:
            raise Declined("no channel has a mean error beyond its uncertainty")
        bias.set(bias.value.double() - shift)
        step = f"{self.name}: moved by {float(shift.abs().max()):.3g} at most"
        bias.note(step)
        return step


def _means(node: Node, pair: Pair) -> Tensor:
    """The mean error of each channel in each sample, [samples, channels]."""
    return channels_first(node, pair.rounded - pair.exact).mean(2)


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

"""Batch-norm re-estimation: give channels of the quantized model the mean and spread of float."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.ops import BATCH_NORM, CONV_TRANSPOSE, argument, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant
from pt2e_quant.passes.algorithms.bias_correction import LAYERS, channels_first
from pt2e_quant.passes.algorithms.grid import Declined, scale_of
from pt2e_quant.passes.algorithms.paired_run import Block

Values = list[tuple[Tensor, Tensor]]
"""Outputs of a call with float and rounded weight, float64[samples, channels, positions]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchNormReestimation(Algorithm):
    """Re-estimate batch norms on the quantized model; folded ones by a scale and shift of outputs.

    A batch norm that is left gets the mean and variance that its input has in the quantized model
    (Sun et al. 2019). Of a layer that one was folded into, each output channel y is replaced by
    a y + c: a undoes the gain that rounding the weight has given the channel, c the shift of its
    mean. a goes into the scales of the weight's rows, whose integers stay, and c into the bias.
    The least squared distance to the float model would take noise for gain, and shrink channels
    layer after layer. A channel is changed where what one half of the samples calls for helps on
    the other half, in both directions.

    Before:  conv(x, w, b)
    After:   conv(x, a * w, a * b + c)

    Args:
        widest: a is between 1 / widest and widest.
    """

    name: ClassVar[str] = "batch_norm_reestimation"
    paper: ClassVar[str] = "Sun et al. 2019, Hybrid 8-bit floating point training, NeurIPS 2019"
    fits: ClassVar[str] = "layers with integer weights with a scale per row or group, and a bias"
    stage: ClassVar[Stage] = Stage.CORRECTIONS
    needs_calls: ClassVar[bool] = True

    widest: float = 1.5

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every quantized layer with a bias, and every batch norm, in graph order."""
        layers = {n for n in graph.quantized(LAYERS) if argument(n, "bias") is not None}
        layers = {n for n in layers if not is_call(n, CONV_TRANSPOSE)}
        for node in graph.gm.graph.nodes:
            if node in layers:
                yield Site(graph, node, "weight")
            elif is_call(node, BATCH_NORM):
                yield Site(graph, node, "running_mean")

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Correct one layer or batch norm."""
        if site.slot == "running_mean":
            return self._norm(site)
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        bias = site.graph.constant(site.node, "bias")
        if weight.qparams().is_per_tensor:
            raise Declined("its weight has one scale for all rows")
        pairs = _outputs(site.graph, site.node, weight, bias)
        factor, shift = _fit_checked(pairs, bias.value.double(), self.widest)
        if not bool((factor != 1).any() | (shift != 0).any()):
            raise Declined("no scale and shift fitted to half of the calls helps on the other half")
        _scale_rows(weight, factor)
        bias.set(bias.value.double() * factor + shift)
        step = (
            f"{self.name}: rows scaled by {float(factor.min()):.3g} .. {float(factor.max()):.3g}, "
            f"bias moved by {float(shift.abs().max()):.3g} at most"
        )
        weight.note(step)
        return step

    def _norm(self, site: Site) -> str:
        mean = site.graph.constant(site.node, "running_mean")
        variance = site.graph.constant(site.node, "running_var")
        run, node = site.graph.run, site.node
        run.reach(node)
        values = [p.rounded.double() for p in run.operands(argument(node, "input"))]
        rows = torch.cat(
            [v.reshape(*v.shape[:2], -1).transpose(1, 2).flatten(0, 1) for v in values]
        )
        if len(rows) < 2:
            raise Declined("one value of each channel has no variance")
        mean.set(rows.mean(0))
        variance.set(rows.var(0))
        return f"{self.name}: mean and variance of {len(rows)} quantized values a channel"


def _outputs(graph: AlgorithmGraph, node: Node, weight: Constant, bias: Constant) -> Values:
    """The outputs of a layer on the quantized model's inputs, with float constants and its own.

    Gains of the model before the layer are left out: undone layer by layer they would amplify what
    noise has taken.
    """
    run, floats = graph.run, graph.gathered.floats
    exact = {c.observed or c.node: floats.get(c.node, c.value) for c in (weight, bias)}
    run.reach(node)
    block, found = Block((node,), node), []
    with torch.no_grad():
        for call in range(run.count):
            wanted = run.replay(block, call, exact, exact=False)
            made = run.replay(block, call, {}, exact=False)
            found.append((channels_first(node, wanted), channels_first(node, made)))
    return found


def _scale_rows(weight: Constant, factor: Tensor) -> None:
    """Multiply rows of a weight and their scales, so that its integers stay."""
    scale = scale_of(weight.qparams())
    if scale.shape[0] != len(factor):
        raise Declined("its scales are not along its output channels")
    weight.set_scale(scale * _along(factor, scale).float())
    value = weight.value.double()
    weight.set(value * _along(factor, value), keeps_qparams=True)


def _along(factor: Tensor, like: Tensor) -> Tensor:
    return factor.reshape(-1, *[1] * (like.dim() - 1))


def _fit_checked(pairs: Values, bias: Tensor, widest: float) -> tuple[Tensor, Tensor]:
    """Scale and shift of each channel that help on data they were not fitted to, else 1 and 0."""
    samples = [(x[i : i + 1], z[i : i + 1]) for x, z in pairs for i in range(len(x))]
    identity = torch.ones_like(bias), torch.zeros_like(bias)
    if len(samples) < 2:
        raise Declined("one sample cannot be fitted and checked")
    halves = _Channels.of(samples[::2]), _Channels.of(samples[1::2])
    helps = torch.ones_like(bias, dtype=torch.bool)
    for fitted, held in (halves, halves[::-1]):
        made = fitted.fit(widest)
        helps &= held.error(*made) < held.error(*identity)
    factor, shift = _Channels.of(samples).fit(widest)
    return torch.where(helps, factor, identity[0]), torch.where(helps, shift, identity[1])


@dataclass(frozen=True, slots=True)
class _Channels:
    """Channels of the float model x and the quantized one z = gain * x + noise, float64[C] all."""

    mean: Tensor
    variance: Tensor
    found_mean: Tensor
    gain: Tensor

    @classmethod
    def of(cls, samples: Values) -> "_Channels":
        exact = torch.cat([x.transpose(0, 1).flatten(1) for x, _ in samples], 1)
        found = torch.cat([z.transpose(0, 1).flatten(1) for _, z in samples], 1)
        mean, found_mean = exact.mean(1), found.mean(1)
        variance = exact.var(1, correction=0)
        shared = ((exact - mean[:, None]) * (found - found_mean[:, None])).mean(1)
        is_constant = variance <= 1e-12 * (mean.square() + 1e-30)
        gain = torch.where(is_constant, 1.0, shared / variance.clamp(min=1e-300))
        return cls(mean, variance, found_mean, gain)

    def fit(self, widest: float) -> tuple[Tensor, Tensor]:
        """The factor and shift that give each channel its gain and mean back."""
        factor = (1 / self.gain.clamp(min=1 / widest)).clamp(1 / widest, widest)
        return factor, self.mean - factor * self.found_mean

    def error(self, factor: Tensor, shift: Tensor) -> Tensor:
        """The squared error of each channel by gain and mean after a correction, without noise."""
        mean = self.mean - factor * self.found_mean - shift
        return (factor * self.gain - 1).square() * self.variance + mean.square()

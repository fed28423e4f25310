"""Cross-layer equalization: give the channels between two layers weights of the same range."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.dtypes import limits_of
from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.ops import CONV, RELU, argument, is_call
from pt2e_quant.observers.qschemes import PER_CHANNEL
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, is_quantized_output
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.layer_pairs import LayerPair, layer_pairs
from pt2e_quant.passes.algorithms.scale_targets import columns_of, divide_inputs, rows_of

EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
ROUNDS = 20
"""Times that all pairs are gone through: factors of a chain of layers settle after a few."""


@dataclass(frozen=True, slots=True)
class _Plan:
    pair: LayerPair
    factors: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossLayerEqualization(Algorithm):
    """Divide the output channels of a layer by factors, and multiply the next layer's inputs.

    The factor of channel i makes its two ranges equal (equation 11 of the paper),

        s_i = sqrt(r1_i * r2_i) / r2_i,

    r1 the greatest magnitude of the row in the first weight, r2 that of the column in the second.
    Where rows have scales of their own, or the activation between is the more delicate, that may
    be too much: of s ** a the one is taken that rounding is expected to disturb least. It runs
    before calibration, so ranges of activations are found anew. Biases that are large in
    comparison with the spread of their channel go into the next layer's bias (section 4.1.3), where
    a batch norm told mean and spread.

    Before:  y = conv(relu(conv(x, w1, b1)), w2)
    After:   y = conv(relu(conv(x, w1 / s, b1 / s)), w2 * s)

    Args:
        least_gain: by what factor the expected error must fall.
        widest: the greatest ratio of two channels' factors.
        deviations: spreads that a channel's values are taken to lie within, for absorption; 0
            leaves biases as they are.
    """

    name: ClassVar[str] = "cross_layer_equalization"
    paper: ClassVar[str] = "Nagel et al. 2019, Data-free quantization, arXiv 1906.04721"
    fits: ClassVar[str] = "layers with integer weights that feed each other, at most through a relu"

    least_gain: float = 1.5
    widest: float = 1e4
    deviations: float = 3.0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The first layer of each pair, with the factors that come of going round all pairs."""
        plans: dict[Node, Declined | None] = {}
        pairs: list[LayerPair] = []
        ranges = _Ranges()
        for found in layer_pairs(graph):
            if not isinstance(found, LayerPair):
                plans[found[0]] = found[1]
                continue
            if not any(rounding_of(n) for n in (found.first, *found.readers)):
                continue
            try:
                ranges.add(graph, found)
            except Declined as reason:
                plans[found.first] = reason
                continue
            plans[found.first] = None
            pairs.append(found)
        total = ranges.settle(pairs, self.widest)
        by_first = {
            pair.first: _Plan(pair, self._best(ranges, pair, total[pair.first])) for pair in pairs
        }
        return [Site(graph, n, "weight", reason or by_first[n]) for n, reason in plans.items()]

    def _best(self, ranges: "_Ranges", pair: LayerPair, factors: Tensor) -> Tensor:
        """The power of the factors with the least expected error; 1 if none is low enough."""
        errors = {a: ranges.expected_error(pair, factors**a) for a in EXPONENTS}
        best = min(errors, key=errors.__getitem__)
        return factors**best if errors[0.0] > self.least_gain * errors[best] else factors**0.0

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Equalize one pair, then absorb what of its biases is large."""
        plan: _Plan = site.plan
        pair, factors = plan.pair, plan.factors
        spread = float(factors.max() / factors.min())
        done = []
        if spread > 1:
            source = pair.between[-1] if pair.between else pair.first
            target = rows_of(site.graph, pair.first, keeps_sign=True)
            divide_inputs(
                site.graph,
                target,
                factors,
                source=source,
                linears=pair.readers,
                by=self.name,
                on_the_way=(pair.first, *pair.between),
            )
            moments: OutputMoments | None = pair.first.meta.get(OUTPUT_MOMENTS_KEY)
            if moments is not None:
                pair.first.meta[OUTPUT_MOMENTS_KEY] = moments.mapped(1 / factors)
            done.append(f"ranges of channels moved by up to x{spread:.3g}")
        absorbed = self._absorb(site.graph, pair) if self.deviations > 0 else 0
        if absorbed:
            done.append(f"biases of {absorbed} channels absorbed")
        if not done:
            raise Declined("its channels are even already")
        return f"{self.name}: {', '.join(done)}"

    def _absorb(self, graph: AlgorithmGraph, pair: LayerPair) -> int:
        """Let the next layers add what the first layer's channels have at least; how many do.

        relu(z) = relu(z - c) + c where z >= c, and the next layer adds w2 c to its bias. At the
        edges of padded images the zeros would count as c: such layers are left.
        """
        moments: OutputMoments | None = pair.first.meta.get(OUTPUT_MOMENTS_KEY)
        if moments is None or any(not is_call(n, RELU) for n in pair.between):
            return 0
        if any(is_call(n, CONV) and _is_padded(n) for n in pair.readers):
            return 0
        least = (moments.mean - self.deviations * moments.deviation).clamp(min=0.0)
        if not float(least.max()) > 0 or argument(pair.first, "bias") is None:
            return 0
        try:
            own = graph.constant(pair.first, "bias")
            weights = [graph.constant(n, "weight") for n in pair.readers]
            biases = [graph.constant(n, "bias") for n in pair.readers]
        except Declined:
            return 0
        own.set(own.value.double() - least)
        pair.first.meta[OUTPUT_MOMENTS_KEY] = moments.mapped(1.0, -least)
        for reader, weight, bias in zip(pair.readers, weights, biases, strict=True):
            product = weight.value.double() * columns_of(least, reader)
            bias.set(bias.value.double() + product.flatten(1).sum(1))
        return int((least > 0).sum())


class _Ranges:
    """Greatest magnitudes of the rows and columns of weights, while factors are found."""

    def __init__(self) -> None:
        self._weights: dict[Node, Tensor] = {}
        self._given: dict[Node, Tensor] = {}

    def add(self, graph: AlgorithmGraph, pair: LayerPair) -> None:
        """Take in the weights of a pair.

        Raises:
            Declined: they cannot be changed.
        """
        rows = rows_of(graph, pair.first, keeps_sign=True)
        held = {reader: graph.constant(reader, "weight").value for reader in pair.readers}
        for node, value in {pair.first: rows.weight.value, **held}.items():
            self._given.setdefault(node, value.detach().double())
            self._weights.setdefault(node, self._given[node].abs())

    def settle(self, pairs: Sequence[LayerPair], widest: float) -> dict[Node, Tensor]:
        """The product of all factors of each pair."""
        total: dict[Node, Tensor] = {}
        for _ in range(ROUNDS):
            largest = 0.0
            for pair in pairs:
                factors = self._factors(pair)
                before = total.get(pair.first, torch.ones_like(factors))
                both = (before * factors).clamp(widest**-0.5, widest**0.5)
                self._move(pair, both / before)
                largest = max(largest, float((both / before).log().abs().max()))
                total[pair.first] = both
            if largest < 0.01:
                break
        return total

    def _factors(self, pair: LayerPair) -> Tensor:
        first = self._weights[pair.first].flatten(1).amax(1)
        second = torch.stack([_columns(self._weights[r], r) for r in pair.readers]).amax(0)
        # A channel without weights on either side stays as it is.
        is_used = (first > 0) & (second > 0)
        return torch.where(is_used, (first / second).sqrt(), torch.ones_like(first))

    def expected_error(self, pair: LayerPair, factors: Tensor) -> float:
        """The squared error of the readers' outputs that rounding is expected to make, in units.

        All three parts are in units of the square of the layer's input. A channel of the tensor
        between is as large as its row of the first weight makes of inputs of equal size, or as a
        folded batch norm has it.
        """
        first = self._given[pair.first]
        rows = first.flatten(1)
        moments: OutputMoments | None = pair.first.meta.get(OUTPUT_MOMENTS_KEY)
        sizes = rows.square().sum(1).sqrt()
        reaches = 3 * sizes
        if moments is not None:
            unit = float(sizes.norm() / moments.deviation.double().norm().clamp(min=1e-30))
            mean, deviation = (part.double() * unit for part in (moments.mean, moments.deviation))
            sizes, reaches = (mean.square() + deviation**2).sqrt(), mean.abs() + 3 * deviation
        error = 0.0
        for reader in pair.readers:
            own = self._given[reader] * columns_of(factors, reader)
            matters = _columns_sum(own.square(), reader)
            if (rounding := rounding_of(pair.first)) is not None:
                peaks = rows.abs().amax(1) / factors
                peaks = peaks if rounding.is_per_row else peaks.amax().expand_as(peaks)
                error += float(((peaks / rounding.steps).square() * rows.shape[1] * matters).sum())
            if _is_rounded(pair):
                step = float((reaches / factors).amax()) / 127
                error += step**2 * float(matters.sum())
            if (rounding := rounding_of(reader)) is not None:
                peaks = own.abs().flatten(1).amax(1)
                peaks = peaks if rounding.is_per_row else peaks.amax().expand_as(peaks)
                weights = own[0].numel() * float((sizes / factors).square().mean())
                error += float((peaks / rounding.steps).square().sum()) * weights
        return error

    def _move(self, pair: LayerPair, factors: Tensor) -> None:
        weight = self._weights[pair.first]
        weight /= factors.reshape(-1, *[1] * (weight.dim() - 1))
        for reader in pair.readers:
            self._weights[reader] *= columns_of(factors, reader)


def _columns(weight: Tensor, reader: Node) -> Tensor:
    """The greatest of each input channel, [C]."""
    return _by_column(weight, reader).amax((1, 3)).flatten()


def _columns_sum(weight: Tensor, reader: Node) -> Tensor:
    """The sum of each input channel, [C]."""
    return _by_column(weight, reader).sum((1, 3)).flatten()


def _by_column(weight: Tensor, reader: Node) -> Tensor:
    """A weight as [groups, outputs, inputs, positions]."""
    groups = int(argument(reader, "groups")) if is_call(reader, CONV) else 1
    return weight.reshape(groups, weight.shape[0] // groups, weight.shape[1], -1)


def _is_rounded(pair: LayerPair) -> bool:
    """True if an annotation asks for integers on the way between the layers."""
    nodes = (pair.first, *pair.between, *pair.readers)
    annotations = [node.meta.get(Q_ANNOTATION_KEY) for node in nodes]
    inputs = [
        getattr(a, "input_qspec_map", {}).get(argument(r, "input"))
        for a, r in zip(annotations[-len(pair.readers) :], pair.readers, strict=True)
    ]
    return any(spec is not None for spec in inputs) or any(map(is_quantized_output, nodes[:-1]))


@dataclass(frozen=True, slots=True)
class Rounding:
    """The rounding of a weight: steps on either side of zero, and whether rows have own scales."""

    steps: float
    is_per_row: bool


def rounding_of(node: Node) -> Rounding | None:
    """Return the rounding of a layer's weight by its annotation; None where not to integers."""
    specs = getattr(node.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})
    spec = specs.get(argument(node, "weight"))
    dtype = getattr(spec, "dtype", None)
    if not isinstance(dtype, torch.dtype) or dtype.is_floating_point:
        return None
    limits = limits_of(dtype)
    low, high = (getattr(spec, name, None) for name in ("quant_min", "quant_max"))
    low, high = limits.quant_min if low is None else low, limits.quant_max if high is None else high
    return Rounding((high - low) / 2, getattr(spec, "qscheme", None) in PER_CHANNEL)


def _is_padded(conv: Node) -> bool:
    padding = argument(conv, "padding")
    if isinstance(padding, str):
        return padding != "valid"
    return any([padding] if isinstance(padding, int) else padding)

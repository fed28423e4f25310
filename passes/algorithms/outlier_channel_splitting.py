"""Outlier-channel splitting: share the weights of a channel that sets the range among copies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, log10
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.core.output_moments import OUTPUT_MOMENTS_KEY, OutputMoments
from pt2e_quant.core.specs import Q_ANNOTATION_KEY
from pt2e_quant.graph.meta import fake_value
from pt2e_quant.graph.ops import CONV, RESHAPE, argument, aten, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph
from pt2e_quant.passes.algorithms.cross_layer_equalization import Rounding, rounding_of
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.layer_pairs import LayerPair, layer_pairs
from pt2e_quant.passes.algorithms.scale_targets import (
    INPUT_FACTORS_KEY,
    OUTPUT_FACTORS_KEY,
    rows_of,
)

PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
PER_ROW = ((torch.per_channel_affine, 0), (torch.per_channel_symmetric, 0))
"""Schemes and axes of weights with a scale per row."""
SETTLES = 4
"""Times that a step is found from shares that hold parts of a step; it changes less each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierChannelSplitting(Algorithm):
    """Compute a few channels several times, and share their weights in the next layer.

    The ranges of the next layer's weights shrink where the channel's weights set them. The layer
    before gets further rows, equal to the channel's own, so no operator is added. Each channel is
    chosen by how much the squared steps of all rows fall (the paper takes the greatest weight),
    and n copies have weights that are w / n but for parts of a step d that sum to 0,

        w_i = (w + (i - (n - 1) / 2) d) / n,   i = 0 … n - 1,

    so that the rounded copies sum to what w is rounded to (section 3.3 of the paper for n = 2).
    Only weights are split; the paper's splitting of activations needs an operator at run time.

    Before:  y = linear(relu(linear(x, w1)), w2)
    After:   y = linear(relu(linear(x, [w1; w1[c]])), [w2 with w2[:, c] / 2, w2[:, c] / 2])

    Args:
        expand_ratio: how many channels are added at most, as a part of those there are.
        least_gain: by what factor the squared steps must fall.
    """

    name: ClassVar[str] = "outlier_channel_splitting"
    paper: ClassVar[str] = "Zhao et al. 2019, Outlier channel splitting, arXiv 1901.09504"
    fits: ClassVar[str] = "layers with integer weights behind a layer, at most through a relu"

    expand_ratio: float = 0.05
    least_gain: float = 1.2

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The layer before each one with integer weights."""
        for found in layer_pairs(graph):
            if not isinstance(found, LayerPair):
                yield Site(graph, found[0], "weight", found[1])
            elif any(rounding_of(reader) for reader in found.readers):
                yield Site(graph, found.first, "weight", found)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Split what is worth it of the channels between a layer and its readers."""
        graph, pair = site.graph, site.plan
        _check_shapes(pair)
        rows = rows_of(graph, pair.first)
        weights = [graph.constant(reader, "weight") for reader in pair.readers]
        roundings = [rounding_of(reader) for reader in pair.readers]
        peaks = torch.cat(
            [_peaks(w.value, r) for w, r in zip(weights, roundings, strict=True) if r is not None]
        )
        copies = self._copies(peaks)
        index = torch.arange(len(copies)).repeat_interleave(copies)
        # The first copy of each channel keeps its place; the others follow all channels.
        is_first = torch.cat((torch.tensor([True]), index[1:] != index[:-1]))
        order = torch.cat((index[is_first], index[~is_first]))
        before, after = (float((peaks / n).amax(1).square().sum()) for n in (1, copies))
        for weight, rounding in zip(weights, roundings, strict=True):
            weight.set(_split(weight.value.double(), copies, order, rounding))
        for held in (rows.weight, *([] if rows.bias is None else [rows.bias])):
            held.set(held.value[order])
        _widen(graph, pair, order)
        return (
            f"{self.name}: {len(order) - len(copies)} channels more, "
            f"{10 * log10(before / after):.1f} dB smaller steps of weights"
        )

    def _copies(self, peaks: Tensor) -> Tensor:
        """The number of copies of each channel, int64[C].

        Args:
            peaks: [rows, C], the greatest weight of each row's channel in units of its range.

        Raises:
            Declined: too little is won.
        """
        channels = peaks.shape[1]
        copies, before = torch.ones(channels, dtype=torch.int64), peaks.amax(1).square().sum()
        for _ in range(ceil(self.expand_ratio * channels)):
            shares = torch.nn.functional.pad(peaks / copies, (0, 1))  # one channel has no second
            (greatest, second), (place, _) = (part.T for part in shares.topk(2, dim=1))
            shared = peaks.gather(1, place[:, None])[:, 0] / (copies[place] + 1)
            falls = greatest.square() - torch.maximum(shared, second).square()
            gains = torch.zeros(channels, dtype=falls.dtype).index_add_(0, place, falls)
            copies[gains.argmax()] += 1
        if not before > self.least_gain * (peaks / copies).amax(1).square().sum():
            raise Declined("no few of its channels set the ranges of the weights behind it")
        return copies


def _peaks(weight: Tensor, rounding: Rounding) -> Tensor:
    """The greatest of each row and input channel, [rows, C]; of all rows where they share a scale.

    In units of the steps that one side of the range has.
    """
    table = weight.detach().double().abs().reshape(*weight.shape[:2], -1).amax(2)
    if not rounding.is_per_row:
        table = table.amax(0, keepdim=True) * len(table) ** 0.5
    return table / rounding.steps


def _split(weight: Tensor, copies: Tensor, order: Tensor, rounding: Rounding | None) -> Tensor:
    """A weight [N, C, …] with the columns that an order names, in shares that differ by steps."""
    shape = 1, -1, *[1] * (weight.dim() - 2)
    number = copies.reshape(shape)
    middle = (number - 1) / 2
    step = torch.zeros((), dtype=weight.dtype)
    for _ in range(SETTLES):
        if rounding is None:
            break
        # The shares set the range themselves, by a part of a step more than w / n.
        reach = ((weight.abs() + middle * step) / number).flatten(1).amax(1)
        reach = reach if rounding.is_per_row else reach.amax(0, keepdim=True)
        step = (reach / rounding.steps).reshape(-1, *[1] * (weight.dim() - 1))
    numbered = [order[:place].eq(channel).sum() for place, channel in enumerate(order)]
    offset = torch.stack(numbered).reshape(shape) - middle[:, order]
    return (weight[:, order] + offset * step) / number[:, order]


def _check_shapes(pair: LayerPair) -> None:
    for layer in (pair.first, *pair.readers):
        if is_call(layer, CONV) and int(argument(layer, "groups")) > 1:
            raise Declined(f"the channels of {layer.name} are in groups")
    for reader in pair.readers:
        specs = getattr(reader.meta.get(Q_ANNOTATION_KEY), "input_qspec_map", {})
        spec = specs.get(argument(reader, "weight"))
        scheme, axis = (getattr(spec, name, None) for name in ("qscheme", "ch_axis"))
        if spec is not None and scheme not in PER_TENSOR and (scheme, axis) not in PER_ROW:
            raise Declined(f"the weights of {reader.name} have scales for groups")
    for node in pair.between:
        if is_call(node, RESHAPE) and not is_call(node, (aten.flatten.using_ints,)):
            raise Declined(f"{node.name} names the number of channels")


def _widen(graph: AlgorithmGraph, pair: LayerPair, order: Tensor) -> None:
    """Let the values between two layers, and what is noted of them, have the channels named."""
    chosen = order.tolist()
    for node in (pair.first, *pair.between):
        node.meta["val"] = fake_value(graph.editor.mode, node.target, node.args, node.kwargs)
        node.meta.pop("tensor_meta", None)
        _take(node, OUTPUT_FACTORS_KEY, chosen)
    for reader in pair.readers:
        _take(reader, INPUT_FACTORS_KEY, chosen)
    moments: OutputMoments | None = pair.first.meta.get(OUTPUT_MOMENTS_KEY)
    if moments is not None:
        found = OutputMoments(moments.mean[order], moments.deviation[order])
        pair.first.meta[OUTPUT_MOMENTS_KEY] = found


def _take(node: Node, key: str, chosen: Sequence[int]) -> None:
    if (factors := node.meta.get(key)) is not None:
        node.meta[key] = tuple(factors[channel] for channel in chosen)

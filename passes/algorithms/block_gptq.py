"""Block GPTQ: round weights by the second moments of few columns at a time, from kept calls."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node
from torch.nn import functional as F

from pt2e_quant.core.inexact import as_reals
from pt2e_quant.core.progress import show_progress
from pt2e_quant.graph.ops import CONV, LINEAR, argument, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import rows_of
from pt2e_quant.observers.statistics.kept_inputs import KeptCalls
from pt2e_quant.passes.algorithms.algorithm import BARRED_KEY, Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant
from pt2e_quant.passes.algorithms.gptq import inverse_factor
from pt2e_quant.passes.algorithms.grid import Declined, Grid
from pt2e_quant.passes.algorithms.observed_run import (
    OutputError,
    exact_run,
    output_errors_of,
    rounded_run,
)
from pt2e_quant.passes.algorithms.range_groups import is_chosen
from pt2e_quant.passes.algorithms.row_moments import gain_db
from pt2e_quant.passes.algorithms.weight_blocks import output_errors, watch_rows

LEAST_CALLS = 8
"""Of calibration: of few calls the moments of small layers are known badly."""
MOST_KNOWN, MOST_CONFIRMING = 8, 4
"""Calls that tell moments, and calls that the choice is confirmed on."""
MOST_ROWS = 4096
"""Of a layer's input, taken evenly from all calls: 32 for each column of a block."""
COLUMNS = 128
"""Of a block, about: what one column's error can be made up for in is mostly near it."""
STEP = 32
"""Columns whose updates of later ones are made together."""
MOST_LOSS_DB = 0.3
"""The loss that the model may have on the confirming calls, beside two standard errors: less error
of each layer makes a gain of the whole likely before it is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockGptq(Algorithm):
    """Choose the integers of weights by GPTQ within blocks of columns, and check the whole model.

    The error of a rounded column is spread over the columns of its block that are not rounded yet
    (Frantar et al. 2022, algorithm 1, with a Hessian that is block-diagonal). All blocks of a
    weight are rounded together, so that the cost is that of a matrix product with 128 columns, and
    the moments come of a few calls that calibration kept, run once more in float. Where a layer
    has a bias, the mean error of its outputs goes into that, and the moments are those around the
    mean: E[((w - v) (x - E[x]))^2]. On other calls the whole quantized model is held against that
    with plain rounding, which comes back where it is clearly nearer to the float model.

    Together it costs at most 20 runs of the model, and no more than calibration made.

    Args:
        damping: added to the diagonal of each block's moments, as a part of its mean.
        any_observer: also where somebody chose the observers of activations.
    """

    name: ClassVar[str] = "block_gptq"
    paper: ClassVar[str] = "after Frantar et al. 2022, GPTQ, arXiv 2210.17323"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES
    needs_calls: ClassVar[bool] = True

    damping: float = 0.01
    any_observer: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """One for the whole graph, at its first layer: the model gains by all weights or none."""
        if not self.any_observer and is_chosen(graph.gm):
            return []
        layers = self._layers(graph)
        return [Site(graph, layer, "weights", layers) for layer in layers[:1]]

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Round all weights, compare, and keep what is better."""
        graph, kept = site.graph, site.graph.gathered.kept
        count = 0 if kept is None else len(kept.sample)
        if kept is None or count < LEAST_CALLS:
            raise Declined(
                f"weights are rounded plainly: other integers need {LEAST_CALLS} calls, found "
                f"{count}"
            )
        known, confirming = split_calls(kept)
        with torch.no_grad():
            moments = gather_moments(graph, site.plan, known)
            made = {}
            for layer in show_progress(
                site.plan, "rounding weights", enabled=graph.gathered.progress
            ):
                if (found := self._rounded(graph, layer, moments)) is not None:
                    made[layer] = found
            if not made:
                raise Declined("weights are rounded plainly: no other integers are better")
            before, after = self._compare(graph, made.values(), confirming)
        told = (
            f"on {len(confirming)} calls that had no part in the choice, the quantized model is at "
            f"{after.db:.1f} dB with the integers chosen and at {before.db:.1f} dB with plain "
            "rounding"
        )
        if before.sure_gain(after, errors=2.0) > MOST_LOSS_DB:
            raise Declined(f"weights are rounded plainly: {told}")
        for found in made.values():
            found.take()
        return f"the integers of {len(made)} of {len(site.plan)} weights are chosen: {told}"

    def _layers(self, graph: AlgorithmGraph) -> list[Node]:
        layers = graph.quantized((*LINEAR, *CONV))
        return [n for n in layers if self.name not in n.meta.get(BARRED_KEY, ())]

    def _rounded(
        self, graph: AlgorithmGraph, layer: Node, moments: Mapping[Node, "Moments"]
    ) -> "Rounded | None":
        """Other integers of one weight; None where they are no better or nothing is to be set."""
        try:
            weight = graph.constant(layer, "weight", keeps_qparams=True)
            grid, value = weight.grid(), weight.value
            bias = graph.optional_constant(layer, "bias")
        except Declined:
            return None
        seen = moments.get(layer)
        if seen is None or not seen.is_usable:
            return None
        mean = None if bias is None else seen.mean
        rows = seen.split(value.float())
        blocks = replace(
            grid, scale=seen.split(grid.scale, 1.0), zero_point=seen.split(grid.zero_point)
        )
        squares = seen.squares(centred=mean is not None)
        plain = blocks.nearest(rows)
        other = round_blocks(rows, blocks, squares, self.damping)
        errors = [output_errors(rows - one, squares) for one in (plain, other)]
        is_better = errors[1] < errors[0]
        if not bool(is_better.any()):
            return None
        chosen = torch.where(is_better[..., None], other, plain)
        gain = gain_db(errors[0], torch.minimum(*errors))
        shift = None if mean is None else ((rows - chosen) * mean[:, None]).sum(2)
        return Rounded(
            weight,
            seen.join(chosen, value.shape).to(value.dtype),
            bias,
            None if shift is None or bias is None else seen.join_rows(shift),
            f"{self.name}: {gain:.1f} dB less output error",
        )

    def _compare(
        self, graph: AlgorithmGraph, made: Iterable["Rounded"], calls: Sequence[list[Any]]
    ) -> tuple[OutputError, OutputError]:
        """Return the model's error against the float one: plain rounding, then other integers."""
        exact = exact_run(graph.gm, graph.gathered.floats)
        constants = {node: value for found in made for node, value in found.constants.items()}
        runs = rounded_run(graph.gm, {}, {}), rounded_run(graph.gm, constants, {})
        progress = graph.gathered.progress
        before, after = output_errors_of(exact, runs, calls, progress=progress)
        return before, after


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight with other integers, and the bias that goes with it.

    Args:
        weight: the constant.
        value: what it becomes.
        bias: the constant, None where the layer has none.
        shift: what is added to it.
        step: one line for the record.
    """

    weight: Constant
    value: Tensor
    bias: Constant | None
    shift: Tensor | None
    step: str

    @property
    def constants(self) -> dict[Node, Tensor]:
        """The new values by `get_attr` node."""
        found = {self.weight.node: self.value}
        if self.bias is not None and self.shift is not None:
            found[self.bias.node] = self._moved(self.bias, self.shift)
        return found

    def take(self) -> None:
        """Give the constants their values."""
        self.weight.set(self.value, keeps_qparams=True)
        self.weight.note(self.step)
        if self.bias is not None and self.shift is not None:
            self.bias.set(self._moved(self.bias, self.shift))
            self.bias.note(f"{BlockGptq.name}: the mean error of the output is taken off")

    @staticmethod
    def _moved(bias: Constant, shift: Tensor) -> Tensor:
        return (bias.value.double() + shift.double()).to(bias.value.dtype)


@dataclass(slots=True)
class Moments:
    """Moments of what the rows of a weight are multiplied with, by block of columns.

    P stands for the blocks of all groups of a convolution, S for the columns of a block. Blocks of
    one weight are of one size: the last one of a group is filled up with zeros.

    Args:
        groups: of the convolution.
        columns: of a row of the weight.
        size: S.
        count: rows seen.
        total: their sum, [P, S].
        square: the sum of their products, [P, S, S].
    """

    groups: int
    columns: int
    size: int
    count: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros(()))
    square: Tensor = field(default_factory=lambda: torch.zeros(()))

    @classmethod
    def of(cls, layer: Node) -> "Moments":
        """None yet; blocks hold whole windows, so that neighbours in an image stay together."""
        weight = argument(layer, "weight").meta["val"]
        groups = 1 if is_call(layer, LINEAR) else int(argument(layer, "groups"))
        channels, window = weight.shape[1], math.prod(weight.shape[2:])
        blocks = min(channels, -(-channels * window // COLUMNS))
        return cls(groups, channels * window, -(-channels // blocks) * window)

    def add(self, rows: Tensor) -> None:
        """Take in rows [groups, rows, columns]."""
        blocks = self._padded(rows)
        self.count += rows.shape[1]
        self.total = self.total + blocks.sum(1)
        self.square = self.square + blocks.transpose(1, 2) @ blocks

    @property
    def is_usable(self) -> bool:
        """True if there is something to go by."""
        return self.count > 0 and bool(self.square.isfinite().all())

    @property
    def mean(self) -> Tensor:
        """[P, S]."""
        return self.total / self.count

    def squares(self, *, centred: bool) -> Tensor:
        """The moments around 0 or the mean, drawn to their diagonal as few rows ask for.

        S columns seen in n rows: the estimate counts n / (n + S) (linear shrinkage, as Ledoit and
        Wolf 2004).
        """
        found = self.square / self.count
        if centred:
            found = found - self.mean[:, :, None] * self.mean[:, None]
        part = self.size / (self.size + self.count)
        variances = torch.diag_embed(found.diagonal(dim1=1, dim2=2).clamp(min=0.0))
        return (1 - part) * found + part * variances

    def split(self, weight: Tensor, filler: float = 0.0) -> Tensor:
        """Numbers of a weight's shape as [P, rows, S]."""
        return self._padded(weight.reshape(self.groups, -1, self.columns), filler)

    def join(self, blocks: Tensor, shape: torch.Size) -> Tensor:
        """The inverse."""
        rows = blocks.reshape(self.groups, -1, *blocks.shape[1:]).transpose(1, 2).flatten(2)
        return rows[..., : self.columns].reshape(shape)

    def join_rows(self, numbers: Tensor) -> Tensor:
        """Numbers [P, rows] of blocks, added up for each output channel."""
        return numbers.reshape(self.groups, -1, numbers.shape[1]).sum(1).flatten()

    def _padded(self, rows: Tensor, filler: float = 0.0) -> Tensor:
        rows = F.pad(rows, (0, -self.columns % self.size), value=filler)
        return rows.reshape(*rows.shape[:2], -1, self.size).transpose(1, 2).flatten(0, 1)


def split_calls(kept: KeptCalls) -> tuple[list[list[Any]], list[list[Any]]]:
    """Calls that tell moments, and calls that confirm: one run of the first, three of the others.

    Together about as many runs as calibration had calls, or fewer.
    """
    count = len(kept.sample)
    known = min(MOST_KNOWN, count // 2)
    confirming = max(1, min(MOST_CONFIRMING, (kept.count - known) // 3, count - known))
    return kept.sample[:known], kept.sample[known : known + confirming]


def gather_moments(
    graph: AlgorithmGraph, layers: Sequence[Node], calls: Sequence[list[Any]]
) -> dict[Node, Moments]:
    """The moments of the inputs of layers in the float model; of those that run."""
    wanted, found = set(layers), dict[Node, Moments]()
    windows = {layer: watch_rows(layer).window for layer in layers}
    run = exact_run(graph.gm, graph.gathered.floats)
    most = -(-MOST_ROWS // len(calls))

    def take(node: Node, value: Any) -> None:
        if node in wanted:
            given = as_reals(run.env[argument(node, "input")])
            if given.numel():
                rows = rows_of(given.float(), windows[node], most)
                found.setdefault(node, Moments.of(node)).add(rows)

    run.after = take
    for call in show_progress(calls, "reading inputs", enabled=graph.gathered.progress):
        run.call(call)
    return found


def round_blocks(rows: Tensor, grid: Grid, squares: Tensor, damping: float) -> Tensor:
    """Rounded blocks of a weight, each by its own moments.

    Args:
        rows: [P, rows, S].
        grid: of the same shape.
        squares: [P, S, S].
        damping: as of `BlockGptq`.
    """
    order = squares.diagonal(dim1=1, dim2=2).argsort(dim=1, descending=True, stable=True)
    block = torch.arange(len(order), device=order.device)[:, None]

    def in_order(given: Tensor) -> Tensor:
        # Columns are read and written whole: one after the other in memory.
        return given.transpose(1, 2).contiguous()[block, order]

    factor = inverse_factor(squares[block[..., None], order[:, :, None], order[:, None]], damping)
    left, grid = in_order(rows), grid.change(in_order)
    size, done = left.shape[1], torch.empty_like(left)
    for start in range(0, size, STEP):
        stop = min(start + STEP, size)
        errors = torch.empty_like(left[:, start:stop])
        for k in range(start, stop):
            column = Grid(grid.scale[:, k], grid.zero_point[:, k], grid.quant_min, grid.quant_max)
            done[:, k] = column.nearest(left[:, k])
            error = errors[:, k - start] = (left[:, k] - done[:, k]) / factor[:, k, k, None]
            left[:, k + 1 : stop] -= factor[:, k, k + 1 : stop, None] * error[:, None]
        left[:, stop:] -= factor[:, start:stop, stop:].transpose(1, 2) @ errors
    left[block, order] = done
    return left.transpose(1, 2)

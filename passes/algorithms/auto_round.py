"""AutoRound: train roundings and scales of a block's weights with signed gradient descent."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.ops import CONV, LINEAR
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant
from pt2e_quant.passes.algorithms.grid import Declined, Grid, scale_of, spread_over
from pt2e_quant.passes.algorithms.paired_run import Block, PairedRun, blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRound(Algorithm):
    """Train a shift of each weight before rounding and a factor of each scale, block by block.

    A weight is s c * round(w / (s c) + v), v within half a step and c within `least_scale` .. 1.
    Both take steps of one size against the sign of their gradient, through rounding as if it were
    not there, on the squared error of the block's output in one call of calibration at a time. The
    step falls to 0 in a straight line. What was best over all calls is taken; training ends early
    where nothing was better for a while.

    A block is the part of the graph between two places that one value alone passes: a residual
    block, or a layer. Its input is that of the quantized model, its output is to be that of the
    float model.

    Before:  round(w / s) * s
    After:   round(w / (s c) + v) * s c

    Args:
        iterations: steps for a block.
        learning_rate: size of the first step; None for 1 / iterations.
        least_scale: the least factor of a scale.
        patience: checks without progress after which a block is done.
        seed: of the order of calls.
    """

    name: ClassVar[str] = "auto_round"
    paper: ClassVar[str] = "Cheng et al. 2023, SignRound, arXiv 2309.05516"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES
    needs_calls: ClassVar[bool] = True

    iterations: int = 200
    learning_rate: float | None = None
    least_scale: float = 0.7
    patience: int = 4
    seed: int = 0

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The first quantized weight of each block, with the block."""
        quantized = set(graph.quantized((*LINEAR, *CONV)))
        for block in blocks(graph.gm):
            layers = [n for n in block.nodes if n in quantized]
            if layers:
                yield Site(graph, layers[0], "weight", (block, layers))

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Train one block."""
        block, layers = site.plan
        run = site.graph.run
        run.reach(block.nodes[0])
        weights, reasons = _trainable(site.graph, layers)
        if not weights:
            raise Declined("; ".join(reasons))
        trained = [_Trained(weight, self.least_scale) for weight in weights]
        with torch.no_grad():
            exact = [run.replay(block, call, {}, exact=True) for call in range(run.count)]
        if not all(isinstance(value, Tensor) for value in exact):
            raise Declined("the block gives no tensor")
        before, after = self._train(run, block, trained, exact)
        if not after < before:
            raise Declined("no shift of its weights lowers the block's output error")
        for one in trained:
            one.keep()
        step = f"{self.name}: {10 * log10(before / max(after, 1e-300)):.1f} dB less error of block"
        for weight in weights:
            weight.note(step)
        return f"{step}, {len(weights)} weights"

    def _train(
        self,
        run: PairedRun,
        block: Block,
        trained: Sequence["_Trained"],
        exact: Sequence[Tensor],
    ) -> tuple[float, float]:
        """Train a block; returns its squared error before and at best."""
        order, first = random.Random(self.seed), self.learning_rate or 1 / self.iterations
        every = max(1, self.iterations // 10)
        before = best = _error(run, block, trained, exact)
        left = self.patience
        for step in range(self.iterations):
            call = order.randrange(run.count)
            with torch.enable_grad():
                made = {one.node: one.value() for one in trained}
                found = run.replay(block, call, made, exact=False)
                loss = (found - exact[call]).float().square().mean()
            parameters = [p for one in trained for p in one.parameters]
            slopes = torch.autograd.grad(loss, parameters, allow_unused=True)
            size = first * (1 - step / self.iterations)
            for one, own in zip(trained, zip(slopes[::2], slopes[1::2], strict=True), strict=True):
                one.move(own, size)
            if (step + 1) % every == 0:
                error = _error(run, block, trained, exact)
                left = self.patience if error < best else left - 1
                if error < best:
                    best = error
                    for one in trained:
                        one.remember()
                if not left:
                    break
        return before, best


def _trainable(graph: AlgorithmGraph, layers: Iterable[Node]) -> tuple[list[Constant], list[str]]:
    """The weights that can be trained, and why the others cannot."""
    found, reasons = [], []
    for layer in layers:
        try:
            weight = graph.constant(layer, "weight", keeps_qparams=True)
            weight.grid()
            if weight.observed is not None and graph.sharing(weight.observed) > 1:
                raise Declined(f"the scales of {weight.node.target} are shared")
        except Declined as reason:
            reasons.append(str(reason))
        else:
            found.append(weight)
    return found, reasons


def _error(
    run: PairedRun, block: Block, trained: Sequence["_Trained"], exact: Sequence[Tensor]
) -> float:
    """The squared error of a block's output over all calls."""
    total = 0.0
    with torch.no_grad():
        made = {one.node: one.value() for one in trained}
        for call, wanted in enumerate(exact):
            found = run.replay(block, call, made, exact=False)
            total += float((found - wanted).double().square().sum())
    return total


class _Trained:
    """A weight with its shift and the factors of its scales, and the best of them so far."""

    def __init__(self, weight: Constant, least_scale: float) -> None:
        assert weight.observed is not None  # its integers have an observer
        self.weight, self.node = weight, weight.observed
        self.exact = weight.value.detach().float()
        self.grid: Grid = weight.grid()
        self.qparams = weight.qparams()
        self.scale = scale_of(self.qparams)
        self.shift = torch.zeros_like(self.exact).requires_grad_()
        self.factor = torch.ones_like(self.scale).requires_grad_()
        least = weight.least_factors().clamp(min=least_scale)
        half, one = torch.tensor(0.5), torch.tensor(1.0)
        self.limits = (-half, half), (least, one)
        self.best = self.shift.detach().clone(), self.factor.detach().clone()

    @property
    def parameters(self) -> tuple[Tensor, Tensor]:
        return self.shift, self.factor

    def value(self) -> Tensor:
        """The weight on its grid; gradients go through rounding, not through clipping."""
        grid = self.grid.scaled(spread_over(self.factor, self.qparams, self.exact))
        codes = self.exact / grid.scale + self.shift
        codes = codes + (codes.round() - codes).detach()
        codes = codes.clamp(grid.quant_min - grid.zero_point, grid.quant_max - grid.zero_point)
        return (codes * grid.scale).to(self.weight.value.dtype)

    def move(self, slopes: Sequence[Tensor | None], size: float) -> None:
        """Take one step of a size against the signs of the gradients."""
        with torch.no_grad():
            for parameter, slope, limits in zip(self.parameters, slopes, self.limits, strict=True):
                if slope is not None:
                    parameter.sub_(size * slope.sign()).clamp_(*limits)

    def remember(self) -> None:
        """These are the best so far."""
        self.best = self.shift.detach().clone(), self.factor.detach().clone()

    def keep(self) -> None:
        """Let the weight have the best."""
        with torch.no_grad():
            self.shift.copy_(self.best[0])
            self.factor.copy_(self.best[1])
            value = self.value()
        self.weight.set_scale(self.scale * self.factor.detach())
        self.weight.set(value, keeps_qparams=True)

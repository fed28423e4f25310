"""Learned weight clipping: train the part of each range that a weight is rounded in."""

from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Site, Stage, WeightAlgorithm
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.weight_blocks import (
    WeightBlocks,
    gathered_hessians,
    output_errors,
    round_through,
    watch_rows,
)

START = 4.0
"""The first value of a factor's sigmoid: 0.982 of the range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lwc(WeightAlgorithm):
    """Learn how much of its range each row or group is rounded in, by gradient descent.

    OmniQuant's learnable weight clipping (equation 2): the ends of a range are sigmoid(g) * max
    and sigmoid(b) * min, trained through a straight-through rounding. The loss here is the
    operator's output error, by its input's second moments; published code takes a whole block's.
    A row whose output error does not fall keeps its range.

    Args:
        steps: of Adam.
        learning_rate: of Adam.
    """

    name: ClassVar[str] = "lwc"
    paper: ClassVar[str] = "Shao et al. 2023, OmniQuant, arXiv 2308.13137, section 3.2"
    fits: ClassVar[str] = "linears and convolutions with weights in integers per row or group"
    stage: ClassVar[Stage] = Stage.SCALES

    steps: int = 60
    learning_rate: float = 0.05

    def statistics(self, site: Site) -> Statistics:
        """The Hessian of the input, of a convolution that of its windows."""
        return watch_rows(site.node)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Learn the ranges of one weight."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        blocks = WeightBlocks.of(weight, gathered_hessians(statistics))
        with torch.enable_grad():
            scale, zero_point = self._learn(blocks)
        before, after = blocks.take(scale, zero_point)
        if not after < before:
            raise Declined("no learned range lowers the error")
        step = f"lwc: {10 * log10(before / max(after, 1e-30)):.1f} dB less output error"
        weight.note(step)
        return step

    def _learn(self, found: WeightBlocks) -> tuple[Tensor, Tensor]:
        """The best scales and zero_points of each row that training came by, [P, rows, 1]."""
        blocks, qparams = found.blocks, found.qparams
        zero = found.by_block(qparams.zero_point).float()
        ends = blocks.amin(2, keepdim=True).clamp(max=0), blocks.amax(2, keepdim=True).clamp(min=0)
        factors = torch.full((2, *zero.shape), START, requires_grad=True)
        optimizer = torch.optim.Adam([factors], lr=self.learning_rate)
        hessians = found.hessians / found.hessians.diagonal(dim1=1, dim2=2).mean().clamp(min=1e-30)
        groups, rows, length = found.rows.shape
        least = torch.full((groups, 1, rows, 1), torch.inf)
        best = [found.by_block(qparams.scale), zero]
        for _ in range(self.steps):
            low, high = (factor.sigmoid() * end for factor, end in zip(factors, ends, strict=True))
            if found.is_symmetric:
                reach, used = torch.maximum(high, -low), zero
                scale = 2 * reach / (qparams.quant_max - qparams.quant_min)
                scale = scale.clamp(min=torch.finfo(torch.float32).eps)
            else:
                scale, used = found.covering(low, high)
            codes = round_through(blocks / scale) + used
            made = (codes.clamp(qparams.quant_min, qparams.quant_max) - used) * scale
            wrong = (made - blocks).reshape(groups, -1, rows, blocks.shape[2]).transpose(1, 2)
            errors = output_errors(wrong.reshape(groups, rows, length), hessians)
            with torch.no_grad():
                better = errors.reshape(groups, 1, rows, 1) < least
                least = torch.minimum(least, errors.reshape(groups, 1, rows, 1))
                for index, now in enumerate((scale, used)):
                    chosen, kept = (x.reshape(groups, -1, rows, 1) for x in (now, best[index]))
                    best[index] = torch.where(better, chosen, kept).reshape(zero.shape)
            optimizer.zero_grad()
            errors.sum().backward()  # type: ignore[no-untyped-call]  # torch has no types there
            optimizer.step()
        return best[0], best[1].int()

"""AdaRound: choose for each weight whether to round it down or up, by the layer's output error."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Site, Stage, WeightAlgorithm
from pt2e_quant.passes.algorithms.grid import Declined, Grid
from pt2e_quant.passes.algorithms.row_moments import RowMoments, gain_db, row_moments

ZETA, GAMMA = 1.1, -0.1
"""The stretch of the rectified sigmoid beyond 1 and 0 (section 3.2 of the paper)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaRound(WeightAlgorithm):
    """Round weights down or up so that the layer's output changes least.

    Layer by layer in graph order, with the inputs of the quantized model and the outputs of the
    float model (equation 25, without the activation function). A weight is scale * (floor(w /
    scale) + h(v)), h a sigmoid stretched and clamped to 0 .. 1; v is trained with Adam on the
    output error plus a term that drives h to 0 or 1. The error is a square form of the second
    moments of the inputs, so a step costs the same whatever the calibration data is, and no data
    is drawn at random. Last, single weights are turned over while that helps their row. A row
    whose output error would be smaller with plain rounding is rounded plainly.

    Before:  round(w / scale)
    After:   floor(w / scale) + h,  h in {0, 1}

    Args:
        iterations: at most so many steps for a weight.
        learning_rate: of Adam.
        regularization: how much h away from 0 and 1 costs, beside an output error that is 1 with
            plain rounding.
        warm_start: the part of the steps without that term.
        beta: first and last exponent of that term.
    """

    name: ClassVar[str] = "adaround"
    paper: ClassVar[str] = "Nagel et al. 2020, Up or down? Adaptive rounding, arXiv 2004.10568"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES
    needs_calls: ClassVar[bool] = True

    iterations: int = 300
    learning_rate: float = 0.1
    regularization: float = 8.0
    warm_start: float = 0.2
    beta: tuple[float, float] = (20.0, 2.0)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Round one weight."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        moments = row_moments(site.graph, site.node, weight)
        value, grid = weight.value, weight.grid().change(moments.per_group)
        rows = moments.per_group(value.float())
        plain = grid.nearest(rows)
        chosen = self._round(rows, grid, moments)
        before, after = moments.errors(plain), moments.errors(chosen)
        better = after < before
        if not bool(better.any()):
            raise Declined("plain rounding is as good")
        made = torch.where(better[..., None], chosen, plain)
        weight.set(made.reshape(value.shape), keeps_qparams=True)
        moved = float((made != plain).float().mean())
        step = (
            f"{self.name}: {gain_db(before, torch.minimum(before, after)):.1f} dB less output "
            f"error, {100 * moved:.0f} % rounded the other way"
        )
        weight.note(step)
        return step

    def _round(self, rows: Tensor, grid: Grid, moments: RowMoments) -> Tensor:
        """Rows rounded, [groups, N, K]."""
        exact = rows / grid.scale
        low = exact.floor()
        part = (exact - low).clamp(0.001, 0.999)
        v = torch.log((part - GAMMA) / (ZETA - part)).requires_grad_()
        optimizer = torch.optim.Adam([v], lr=self.learning_rate)
        ranges = grid.quant_min - grid.zero_point, grid.quant_max - grid.zero_point
        # Each row counts alike: its error with plain rounding is 1.
        units = moments.errors(grid.nearest(rows)).clamp(min=1e-30)[..., None]
        for step in range(self.iterations):
            sigmoid = torch.sigmoid(v.detach())
            stretched = sigmoid * (ZETA - GAMMA) + GAMMA
            h = stretched.clamp(0.0, 1.0)
            codes = low + h
            inside = (codes >= ranges[0]) & (codes <= ranges[1])
            values = codes.clamp(*ranges) * grid.scale
            slope = moments.slope(values) / units * grid.scale * inside
            progress = step / self.iterations
            if progress >= self.warm_start:
                slope = slope + self._pull(h, progress)
                if bool(((h == 0) | (h == 1)).all()):
                    break
            v.grad = slope * (stretched == h) * sigmoid * (1 - sigmoid) * (ZETA - GAMMA)
            optimizer.step()
        up = torch.sigmoid(v.detach()) * (ZETA - GAMMA) + GAMMA >= 0.5
        low, high = low.clamp(*ranges) * grid.scale, (low + 1).clamp(*ranges) * grid.scale
        return _polished(torch.where(up, high, low), low + high, moments)

    def _pull(self, h: Tensor, progress: float) -> Tensor:
        """The gradient of the sum of 1 - |2 h - 1| ** beta, as a mean over a row."""
        first, last = self.beta
        done = (progress - self.warm_start) / max(1e-9, 1 - self.warm_start)
        beta = last + (first - last) * (1 - done)
        centred = 2 * h - 1
        slope = -2 * beta * centred.abs().pow(beta - 1) * centred.sign()
        return self.regularization / h.shape[-1] * slope


def _polished(values: Tensor, sums: Tensor, moments: RowMoments) -> Tensor:
    """Turn over the weight of each row that lowers its error most, until none does.

    Args:
        values: [groups, N, K], each the lower or the upper of two neighbours.
        sums: of both neighbours.
        moments: of the inputs.
    """
    values, slope = values.clone(), moments.slope(values)
    curvature = moments.square.diagonal(dim1=1, dim2=2)[:, None]
    for _ in range(values.shape[-1]):
        turn = sums - 2 * values
        change = turn * slope + turn.square() * curvature
        best, place = change.min(2)
        turn = turn.gather(2, place[..., None]) * (best < 0)[..., None]
        if not bool((best < 0).any()):
            break
        values.scatter_add_(2, place[..., None], turn)
        rows = torch.stack([z[p] for z, p in zip(moments.square, place, strict=True)])
        slope += 2 * turn * rows
    return values

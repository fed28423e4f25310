"""GPTQ: round a weight column by column, and let later columns make up for each error."""

from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Site, Stage, WeightAlgorithm
from pt2e_quant.passes.algorithms.algorithm_graph import Constant
from pt2e_quant.passes.algorithms.grid import Declined, Grid
from pt2e_quant.passes.algorithms.weight_blocks import (
    gathered_hessians,
    output_errors,
    row_qparams,
    watch_rows,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(WeightAlgorithm):
    """Choose the integers of weights so that the operator's output changes least.

    The error of a rounded column is spread over the columns not yet rounded by the inverse Hessian
    of the inputs (Frantar et al. 2022, algorithm 1), in blocks, by the Cholesky factor of the
    inverse. Qparams stay those that the weight's observer found (static groups), or those of a
    group are found when its first column is reached, from its columns as they are then. A row
    whose output error would be smaller with plain rounding is rounded plainly.

    Args:
        block_size: columns that are updated together, B in the paper.
        damping: added to the Hessian's diagonal, as a part of its mean.
        act_order: round the columns with the largest inputs first; needs static groups, because a
            group's columns are then not reached together.
        static_groups: find all qparams before the first column is rounded.

    Raises:
        ConfigError: act_order without static_groups.
    """

    name: ClassVar[str] = "gptq"
    paper: ClassVar[str] = "Frantar et al. 2022, GPTQ, arXiv 2210.17323"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES

    block_size: int = 128
    damping: float = 0.01
    act_order: bool = True
    static_groups: bool = True

    def __post_init__(self) -> None:
        """Refuse an order that groups cannot follow."""
        if self.act_order and not self.static_groups:
            raise ConfigError(
                "gptq with act_order reaches the columns of a group at different times",
                fix="act_order=False, or static_groups=True",
            )

    def statistics(self, site: Site) -> Statistics:
        """The Hessian of the input, of a convolution that of its windows."""
        return watch_rows(site.node)

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Round one weight."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        hessians, value = gathered_hessians(statistics), weight.value
        shape = len(hessians), -1, hessians.shape[-1]
        rows = value.float().reshape(shape)
        plain = weight.grid().change(lambda q: q.reshape(shape))
        refit = None if self.static_groups else _Refit.of(weight)
        made, before, after = [], 0.0, 0.0
        for group, (part, hessian) in enumerate(zip(rows, hessians, strict=True)):
            found = [plain[group].nearest(part), self._round(part, plain[group], hessian, refit)]
            errors = [output_errors(part - one, hessian) for one in found]
            better = errors[1] < errors[0]
            made.append(torch.where(better[:, None], found[1], found[0]))
            before += float(errors[0].sum())
            after += float(torch.minimum(*errors).sum())
        if not after < before:
            raise Declined("plain rounding is as good")
        if refit is not None:
            refit.take(better)
        weight.set(torch.cat(made).reshape(value.shape), keeps_qparams=True)
        step = f"gptq: {10 * log10(before / max(after, 1e-30)):.1f} dB less output error"
        weight.note(step)
        return step

    def _round(
        self, rows: Tensor, grid: Grid, hessian: Tensor, refit: "_Refit | None" = None
    ) -> Tensor:
        """Rounded rows float32[N, K] by a Hessian float32[K, K]."""
        order = torch.arange(rows.shape[1])
        if self.act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        factor = inverse_factor(hessian[order][:, order], self.damping)
        # Columns are rows here: each is read and written whole.
        left, grid = rows.T[order], grid.change(lambda q: q.T[order])
        done = torch.empty_like(left)
        for start in range(0, len(left), self.block_size):
            stop = min(start + self.block_size, len(left))
            errors = torch.empty_like(left[start:stop])
            for k in range(start, stop):
                if refit is not None and k % refit.size == 0:
                    # Columns beyond the block have yet to take the errors of this one.
                    ahead = left[k : k + refit.size].clone()
                    ahead[stop - k :] -= (
                        factor[start:k, stop : k + refit.size].T @ errors[: k - start]
                    )
                    found = refit(k, ahead.T)
                    for own, now in zip((grid.scale, grid.zero_point), found, strict=True):
                        own[k : k + refit.size] = now
                done[k] = grid[k].nearest(left[k])
                errors[k - start] = (left[k] - done[k]) / factor[k, k]
                left[k + 1 : stop].addr_(factor[k, k + 1 : stop], errors[k - start], alpha=-1)
            left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        return done[order.argsort()].T


class _Refit:
    """Finds the qparams of one group of columns after the other.

    Args:
        weight: of a linear, in groups.
        size: of a group.
    """

    def __init__(self, weight: Constant, size: int) -> None:
        self.weight = weight
        self.size = size
        self.old = row_qparams(weight)
        self.scale, self.zero_point = self.old.scale.clone(), self.old.zero_point.clone()

    @classmethod
    def of(cls, weight: Constant) -> "_Refit | None":
        """The groups of a weight; None where its rows have one scale, which is found before."""
        size = row_qparams(weight).group_size
        return None if size is None else cls(weight, size)

    def __call__(self, column: int, values: Tensor) -> tuple[Tensor, Tensor]:
        """Scale and zero_point of a group [N, size] that begins at a column, both [N]."""
        grid, group = self.weight.grid(values), column // self.size
        self.scale[:, group], self.zero_point[:, group] = grid.scale[:, 0], grid.zero_point[:, 0]
        return grid.scale[:, 0], grid.zero_point[:, 0]

    def take(self, rows: Tensor) -> None:
        """Let the weight have them in some rows, bool[N]."""
        scale = torch.where(rows[:, None], self.scale, self.old.scale)
        self.weight.set_scale(
            scale, torch.where(rows[:, None], self.zero_point, self.old.zero_point)
        )


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian [..., K, K].

    Raises:
        CalibrationError: NaN or infinity in it, which no damping removes.
    """
    mean = hessian.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    if not mean.isfinite().all():
        raise CalibrationError(
            "the squares of the inputs that calibration has seen are NaN or infinite",
            fix="leave out batches with NaN, infinity or magnitudes above 1e18",
        )
    mean = mean.clamp(min=torch.finfo(torch.float32).tiny)
    while True:
        damped = hessian + damping * mean * torch.eye(hessian.shape[-1], device=hessian.device)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed.any():
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed.any():
            return torch.triu(upper)
        damping = max(10 * damping, 1e-4)

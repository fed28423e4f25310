"""Sequential MSE: choose the scales of weights by the error of what the layer computes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Site, Stage, WeightAlgorithm
from pt2e_quant.passes.algorithms.grid import Declined, scale_of
from pt2e_quant.passes.algorithms.row_moments import RowMoments, gain_db, row_moments


@dataclass(frozen=True, slots=True, kw_only=True)
class SequentialMse(WeightAlgorithm):
    """Shrink the scales of each row of a weight to where the output's squared error is least.

    Layer by layer in graph order, on the inputs that the quantized model has there.

    Before:  scale_i = greatest |w_i| / quant_max
    After:   scale_i * c_i,   c_i of `candidates` numbers between `least` and 1

    Args:
        candidates: how many scales are tried for each row.
        least: the least of them, as a part of what the weight's observer found.
    """

    name: ClassVar[str] = "sequential_mse"
    paper: ClassVar[str] = "Sequential MSE of AIMET; the error of Nagel et al. 2020, equation 21"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.SCALES
    needs_calls: ClassVar[bool] = True

    candidates: int = 20
    least: float = 0.4

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Choose the scales of one weight."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        moments = row_moments(site.graph, site.node, weight)
        grid = weight.grid().change(moments.per_group)
        moments = moments.of_rounding_alone(weight.value.float())
        rows = moments.per_group(weight.value.float())
        parts = torch.linspace(1.0, self.least, self.candidates).tolist()
        scale = scale_of(weight.qparams())
        errors = torch.stack(
            [_errors(grid.scaled(part).nearest(rows) - rows, moments, scale) for part in parts]
        )
        best = errors.argmin(0)
        if not bool((best > 0).any()):
            raise Declined("no smaller scale lowers its output error")
        factors = torch.tensor(parts)[best].flatten()
        weight.set_scale(scale * factors.reshape(scale.shape))
        step = (
            f"{self.name}: {gain_db(errors[0], errors.amin(0)):.1f} dB less output error, scales "
            f"x{float(factors.min()):.2f} at least"
        )
        weight.note(step)
        return step


def _errors(change: Tensor, moments: RowMoments, scale: Tensor) -> Tensor:
    """The output error that each scale makes, shaped like the scales.

    Groups of a row are looked at one by one, as if the inputs of two groups had nothing in common.

    Args:
        change: what rounding does to the rows, [groups, N, K].
        moments: of the inputs.
        scale: of the tensor, its rows, or groups of its rows.
    """
    if scale.dim() < 2 or scale.shape[1] == 1:
        errors = ((change @ moments.square) * change).sum(2)
        return (
            errors.sum().reshape(scale.shape) if scale.numel() == 1 else errors.reshape(scale.shape)
        )
    count = scale.shape[1]
    rows, size = change.shape[1], change.shape[2] // count
    parts = change.reshape(rows, count, size).transpose(0, 1)
    squares = moments.square.reshape(count, size, count, size)
    own = squares.diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # [groups of a row, size, size]
    found: Tensor = ((parts @ own) * parts).sum(2).T
    return found

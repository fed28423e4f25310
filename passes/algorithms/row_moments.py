"""Second moments of the inputs of weight rows, in the float and in the quantized model."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.ops import argument
from pt2e_quant.observers.statistics.input_hessian import rows_of
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.weight_blocks import watch_rows

MOST_ROWS = 16384
"""Rows taken of all calls together, evenly from each."""


@dataclass(frozen=True, slots=True)
class RowMoments:
    """Second moments of rows x of the float model and z of the quantized one, float32 all.

    The squared error of an output channel, mean over rows, of a weight v in the place of w is

        E[(w x - v z)^2] = power - 2 v T + v Z v,   T = E[z (w x)],   Z = E[z z].

    Args:
        square: Z, [groups, K, K].
        target: T, [groups, N, K].
        power: E[(w x)^2], [groups, N].
    """

    square: Tensor
    target: Tensor
    power: Tensor

    def errors(self, rows: Tensor) -> Tensor:
        """The mean squared error of each output channel for other weights.

        Args:
            rows: v, [groups, N, K].
        """
        found = self.power + ((rows @ self.square - 2 * self.target) * rows).sum(2)
        return found.clamp(min=0.0)

    def slope(self, rows: Tensor) -> Tensor:
        """The gradient of the sum of `errors`."""
        return 2 * (rows @ self.square - self.target)

    def of_rounding_alone(self, weight: Tensor) -> "RowMoments":
        """The moments for the output of w on the quantized model's rows as the target.

        The least error to the float model's output shrinks weights where inputs are noisy, layer
        after layer: what chooses scales must not see that.
        """
        rows = self.per_group(weight)
        target = rows @ self.square
        return RowMoments(self.square, target, (target * rows).sum(2))

    def per_group(self, weight: Tensor) -> Tensor:
        """A tensor of the weight's shape as [groups, N, K]."""
        return weight.reshape(len(self.square), -1, self.square.shape[-1])


def row_moments(graph: AlgorithmGraph, node: Node, weight: Constant) -> RowMoments:
    """The moments of a linear's or convolution's input in the kept calls.

    Raises:
        Declined: no calls were kept, or values are too large to be squared.
    """
    run = graph.run
    run.reach(node)
    window = watch_rows(node).window
    value = graph.gathered.floats.get(weight.node, weight.value).float()
    count, sums = 0, [torch.zeros(())] * 3
    for exact, rounded in _rows(graph, node):
        x, z = (rows_of(v.float(), window) for v in (exact, rounded))
        step = max(1, -(-x.shape[1] * run.count // MOST_ROWS))
        x, z = x[:, ::step], z[:, ::step]
        outputs = x @ value.reshape(len(x), -1, x.shape[2]).transpose(1, 2)  # [groups, rows, N]
        made = (
            z.transpose(1, 2) @ z,
            outputs.transpose(1, 2) @ z,
            outputs.square().sum(1),
        )
        sums = [total + part for total, part in zip(sums, made, strict=True)]
        count += x.shape[1]
    if not count:
        raise Declined("no calibration data reached it")
    moments = RowMoments(*(part / count for part in sums))
    if not bool(moments.square.isfinite().all() & moments.target.isfinite().all()):
        raise Declined("its inputs are too large to be squared")
    return _shrunk(moments, value.reshape(len(moments.square), -1, moments.square.shape[-1]), count)


def _shrunk(moments: RowMoments, rows: Tensor, count: int) -> RowMoments:
    """Moments drawn towards independent inputs, by the part that few rows leave uncertain.

    K columns seen in n rows: the estimate counts n / (n + K), and columns that do not depend on
    each other and are exact the rest (linear shrinkage, as Ledoit and Wolf 2004).
    """
    part = rows.shape[-1] / (rows.shape[-1] + count)
    variances = moments.square.diagonal(dim1=1, dim2=2)
    scaled = rows * variances[:, None]
    return RowMoments(
        (1 - part) * moments.square + part * torch.diag_embed(variances),
        (1 - part) * moments.target + part * scaled,
        (1 - part) * moments.power + part * (scaled * rows).sum(2),
    )


def _rows(graph: AlgorithmGraph, node: Node) -> Iterator[tuple[Tensor, Tensor]]:
    for pair in graph.run.operands(argument(node, "input")):
        if pair.exact.numel():
            yield pair.exact, pair.rounded


def gain_db(before: Tensor, after: Tensor) -> float:
    """The gain of the second sum of errors over the first, in dB."""
    tiny = torch.finfo(torch.float32).tiny
    return float(10 * (before.sum().clamp(min=tiny) / after.sum().clamp(min=tiny)).log10())

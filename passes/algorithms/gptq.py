"""GPTQ: round a weight column by column, and let later columns make up for each error."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log10
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.ops import CONV, LINEAR, arguments, is_call
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import InputHessian, Window
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, has_integers
from pt2e_quant.passes.algorithms.grid import Declined, Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Algorithm):
    """Choose the integers of weights so that the operator's output changes least.

    The error of a rounded column is spread over the columns not yet rounded by the inverse Hessian
    of the inputs (Frantar et al. 2022, algorithm 1), in blocks, by the Cholesky factor of the
    inverse. Qparams stay those that the weight's observer found (static groups). A row whose
    output error would be smaller with plain rounding is rounded plainly.

    Args:
        block_size: columns that are updated together, B in the paper.
        damping: added to the Hessian's diagonal, as a part of its mean.
        act_order: round the columns with the largest inputs first.
    """

    name: ClassVar[str] = "gptq"
    paper: ClassVar[str] = "Frantar et al. 2022, GPTQ, arXiv 2210.17323"
    fits: ClassVar[str] = "linears and convolutions with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES

    block_size: int = 128
    damping: float = 0.01
    act_order: bool = True

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every quantized weight of a linear or convolution."""
        for node in graph.calls((*LINEAR, *CONV)):
            if has_integers(graph.observer(arguments(node)["weight"])):
                yield Site(graph, node, "weight")

    def statistics(self, site: Site) -> Statistics:
        """The Hessian of the input, of a convolution that of its windows."""
        return InputHessian(None if is_call(site.node, LINEAR) else _window(site.node))

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Round one weight."""
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        if not isinstance(statistics, InputHessian):
            raise Declined("no calibration data reached it")
        hessians, value = statistics.hessian, weight.value
        if not bool(hessians.isfinite().all()):
            raise Declined("its inputs are too large to be squared")
        shape = len(hessians), -1, hessians.shape[-1]
        grid, rows = weight.grid().change(lambda q: q.reshape(shape)), value.float().reshape(shape)
        made, before, after = [], 0.0, 0.0
        for group, (part, hessian) in enumerate(zip(rows, hessians, strict=True)):
            own = grid[group]
            plain, chosen = own.nearest(part), self._round(part, own, hessian)
            errors = [_output_errors(part - found, hessian) for found in (plain, chosen)]
            made.append(torch.where((errors[1] < errors[0])[:, None], chosen, plain))
            before += float(errors[0].sum())
            after += float(torch.minimum(*errors).sum())
        if not after < before:
            raise Declined("plain rounding is as good")
        weight.set(torch.cat(made).reshape(value.shape), keeps_qparams=True)
        step = f"gptq: {10 * log10(before / max(after, 1e-30)):.1f} dB less output error"
        weight.note(step)
        return step

    def _round(self, rows: Tensor, grid: Grid, hessian: Tensor) -> Tensor:
        """Rounded rows float32[N, K] by a Hessian float32[K, K]."""
        order = torch.arange(rows.shape[1])
        if self.act_order:
            order = hessian.diagonal().argsort(descending=True, stable=True)
        factor = _inverse_factor(hessian[order][:, order], self.damping)
        # Columns are rows here: each is read and written whole.
        left, grid = rows.T[order], grid.change(lambda q: q.T[order])
        done = torch.empty_like(left)
        for start in range(0, len(left), self.block_size):
            stop = min(start + self.block_size, len(left))
            errors = torch.empty_like(left[start:stop])
            for k in range(start, stop):
                done[k] = grid[k].nearest(left[k])
                errors[k - start] = (left[k] - done[k]) / factor[k, k]
                left[k + 1 : stop].addr_(factor[k, k + 1 : stop], errors[k - start], alpha=-1)
            left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
        return done[order.argsort()].T


def _inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the inverse of a damped Hessian."""
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    while True:
        damped = hessian + damping * mean * torch.eye(len(hessian))
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return torch.triu(upper)
        damping = max(10 * damping, 1e-4)


def _output_errors(difference: Tensor, hessian: Tensor) -> Tensor:
    """The squared error of each output channel."""
    return ((difference @ hessian) * difference).sum(1)


def _window(conv: Node) -> Window:
    given, kernel = arguments(conv), arguments(conv)["weight"].meta["val"].shape[2:]
    dims, padding = len(kernel), given["padding"]

    def each(numbers: Any) -> tuple[int, ...]:
        found = [numbers] if isinstance(numbers, int) else list(numbers)
        return tuple(found * dims if len(found) == 1 else found)

    dilation = each(given["dilation"])
    if isinstance(padding, str):
        total = [
            d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)
        ]
        pads = tuple((t // 2, t - t // 2) for t in total)
    else:
        pads = tuple((p, p) for p in each(padding))
    return Window(tuple(kernel), each(given["stride"]), pads, dilation, given["groups"])

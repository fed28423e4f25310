"""Low-rank error correction: two thin float linears give back what rounding takes most of."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor

from pt2e_quant.core.errors import module_path
from pt2e_quant.graph.ops import LINEAR, argument, aten
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import InputHessian
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage, record_float
from pt2e_quant.passes.algorithms.algorithm_graph import (
    AlgorithmGraph,
    is_quantized_output,
    is_static_per_tensor,
)
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.weight_blocks import gathered_hessians, output_errors


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank(Algorithm):
    """Add the best low-rank part of a weight's rounding error to a linear, in float.

    The part is the truncated singular value decomposition of the error times a root of the inputs'
    second moments, which makes the output's error least among all of that rank; LQER has a
    diagonal in the place of the root.

    Before:  y = linear(x, w, b)
    After:   y = linear(x, round(w), b) + linear(linear(x, p), q)

    Args:
        rank: inner width of the two linears.
        damping: added to the second moments' diagonal, as a part of its mean.
        least_gain: by what factor the output error must fall.
    """

    name: ClassVar[str] = "low_rank"
    paper: ClassVar[str] = "Zhang et al. 2024, LQER, arXiv 2402.02446"
    fits: ClassVar[str] = "linears in float or dynamic arithmetic with weights in integers"
    stage: ClassVar[Stage] = Stage.CODES

    rank: int = 32
    damping: float = 0.01
    least_gain: float = 1.5

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every linear with a quantized weight."""
        return (Site(graph, node, "weight") for node in graph.quantized(LINEAR))

    def statistics(self, site: Site) -> Statistics:
        """The second moments of the input."""
        return InputHessian()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Add the two linears to one."""
        graph, linear = site.graph, site.node
        weight = graph.constant(linear, "weight", keeps_qparams=True)
        hessian = gathered_hessians(statistics)[0]
        if is_static_per_tensor(graph.observer(argument(linear, "input"))):
            raise Declined("its input is there in integers alone")
        if is_quantized_output(linear):
            raise Declined("its output is computed in integers")
        rank = self.rank
        if 4 * rank > min(weight.value.shape):
            raise Declined(f"two factors of rank {rank} are not small beside its weight")
        value = weight.value.float()
        rounded = weight.grid().nearest(value)
        into, out = _factors(value - rounded, hessian, rank, self.damping)
        before = float(output_errors(value - rounded, hessian).sum())
        after = float(output_errors(value - rounded - out @ into, hessian).sum())
        if not before > self.least_gain * after:
            raise Declined("its error has no part of low rank that is worth two linears")
        weight.set(rounded, keeps_qparams=True)
        self._add(site, into, out)
        step = f"low_rank: {10 * log10(before / max(after, 1e-30)):.1f} dB less output error"
        weight.note(step)
        return step

    def _add(self, site: Site, into: Tensor, out: Tensor) -> None:
        graph, linear = site.graph, site.node
        editor, owner, value = graph.editor, module_path(linear), linear.meta["val"]
        prefix = f"{owner}." if owner else ""
        held = [factor.contiguous().to(value.dtype) for factor in (into, out)]
        first, second = (
            editor.constant(f"{prefix}error_{name}", factor, like=linear)
            for name, factor in zip(("in", "out"), held, strict=True)
        )
        readers = list(linear.users)
        thin = editor.call(
            aten.linear.default, graph.source(linear), first, like=linear, after=linear
        )
        back = editor.call(aten.linear.default, thin, second, like=linear, after=thin)
        total = editor.call(aten.add.Tensor, linear, back, like=linear, after=back, val=value)
        for reader in readers:
            reader.replace_input_with(linear, total)
        reason = f"{self.name} put it there, to give back a part of the rounding error"
        record_float(graph, thin, reason, *held)


def _factors(error: Tensor, hessian: Tensor, rank: int, damping: float) -> tuple[Tensor, Tensor]:
    """The factors [rank, K] and [N, rank] of the part of an error that changes outputs most."""
    mean = hessian.diagonal().mean().clamp(min=torch.finfo(torch.float32).tiny)
    root = torch.linalg.cholesky((hessian + damping * mean * torch.eye(len(hessian))).double())
    left, sizes, right = torch.linalg.svd(error.double() @ root, full_matrices=False)
    into = torch.linalg.solve_triangular(root, right[:rank], upper=False, left=False)
    return into.float(), (left[:, :rank] * sizes[:rank]).float()

"""Keep the sums of two neighbouring products in 16 bits, for CPUs without VNNI."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node

from pt2e_quant.core.pair_sums import MOST, fitted, greatest_pairs, row_blocks
from pt2e_quant.core.qparams import QParams
from pt2e_quant.graph.meta import constant_of
from pt2e_quant.graph.ops import CONV, LINEAR, argument, is_call, is_depthwise
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site, Stage
from pt2e_quant.passes.algorithms.algorithm_graph import AlgorithmGraph, Constant
from pt2e_quant.passes.algorithms.grid import Declined

_ROUNDED = 2
"""By so much the integers of a pair exceed its real weights where both are rounded up."""


class _PairAlgorithm(Algorithm):
    """One with a site at each int8 weight that is multiplied by 8-bit activations."""

    paper: ClassVar[str] = "none: x86's vpmaddubsw adds two products in 16 bits"
    fits: ClassVar[str] = "int8 weights of linears and convolutions with 8-bit activations"

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """Every such weight, once for all that read it.

        Kernels of depthwise convolutions add in 32 bits, and no runtime that adds in 16 bits has
        transposed convolutions of integers.
        """
        met: set[Node] = set()
        for node in graph.quantized((*LINEAR, *CONV)):
            observed = argument(node, "weight")
            if is_call(node, CONV) and is_depthwise(node):
                continue
            if observed in met or not _has_bytes(graph, node):
                continue
            met.add(observed)
            (held,) = observed.all_input_nodes
            if constant_of(graph.gm, held) is not None and held.op == "get_attr":
                yield Site(graph, node, "weight", Constant(graph, node, held, observed))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairScales(_PairAlgorithm):
    """Widen the scales of weights until their pairs fit into 16 bits, and let none be smaller.

    A row of normally distributed weights takes a scale 1.2 to 1.5 times as wide, where seven bits
    take twice the scale. `PairCodes` sees to the integers that other algorithms choose then.
    """

    name: ClassVar[str] = "pair_scales"
    stage: ClassVar[Stage] = Stage.LIMITS

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Widen the scales of one weight."""
        weight: Constant = site.plan
        qparams = _plain(weight)
        needed = greatest_pairs(weight.value.detach()) / (MOST - _ROUNDED)
        if qparams.axis is None:
            needed = needed.amax().reshape(qparams.scale.shape)
        factor = float(weight.limit_scale(needed).max())
        if factor <= 1.0:
            raise Declined("its pairs fit into 16 bits")
        return f"scales x{factor:.2f} at most, so that pairs fit into 16 bits"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairCodes(_PairAlgorithm):
    """Lower the integers of weights whose pairs do not fit into 16 bits."""

    name: ClassVar[str] = "pair_codes"
    stage: ClassVar[Stage] = Stage.CORRECTIONS

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Lower integers of one weight."""
        weight: Constant = site.plan
        _plain(weight)
        rows, grid = weight.value.detach(), weight.grid()
        made, lowered = [], 0
        for block in row_blocks(rows):
            value, per_step = rows[block], grid.scale[block]
            codes = (value.float() / per_step).round().clamp(grid.quant_min, grid.quant_max)
            kept = fitted(codes.to(torch.int16))
            changed = kept != codes
            lowered += int(changed.sum())
            made.append(torch.where(changed, kept * per_step, value))
        if not lowered:
            raise Declined("its pairs fit into 16 bits")
        weight.set(torch.cat(made), keeps_qparams=True)
        told = f"{self.name}: {lowered} integers lowered, so that pairs fit into 16 bits"
        weight.note(told)
        return told


def _plain(weight: Constant) -> QParams:
    """The qparams of int8 weights by row or for all.

    Raises:
        Declined: they are others.
    """
    found = weight.qparams()
    if isinstance(found, QParams) and found.dtype is torch.int8 and found.group_size is None:
        if not bool(found.zero_point.any()):
            return found
    raise Declined("its integers are no symmetric int8 by row")


def _has_bytes(graph: AlgorithmGraph, node: Node) -> bool:
    """True if the input of an operator is quantized to 8 bits."""
    observer: Any = graph.observer(argument(node, "input"))
    return getattr(observer, "dtype", None) in (torch.uint8, torch.int8)

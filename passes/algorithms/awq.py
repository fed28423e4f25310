"""AWQ: scale up the weights that large inputs multiply, and clip ranges, before rounding."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log10
from typing import ClassVar

import torch
from torch import Tensor
from torch.fx import Node

from pt2e_quant.graph.ops import LINEAR, argument
from pt2e_quant.observers.statistics.base import Statistics
from pt2e_quant.observers.statistics.input_hessian import InputHessian
from pt2e_quant.passes.algorithms.algorithm import Algorithm, Site
from pt2e_quant.passes.algorithms.algorithm_graph import (
    AlgorithmGraph,
    Constant,
    has_integers,
    is_quantized_output,
)
from pt2e_quant.passes.algorithms.grid import Declined
from pt2e_quant.passes.algorithms.scale_targets import Rows, divide_inputs, fold_target
from pt2e_quant.passes.algorithms.weight_blocks import (
    WeightBlocks,
    gathered_hessians,
    output_errors,
)

WIDEST = 1000.0
"""The greatest ratio of two channels' sizes that is believed."""
MOST_ROWS = 512
"""Rows of a weight that the search of exponents looks at, evenly spaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq(Algorithm):
    """Search a scale per channel, then a range per group, by the output error of rounded weights.

    Scale (section 3.2): the input is divided and the weight multiplied by size ** alpha per
    channel, where alpha is the one of `grid_size` in 0 .. 1 whose rounded weights change the
    output least. Clip: each row or group then takes the part of its range that does so. The size of
    a channel is its root mean square, and output errors come from the inputs' second moments, so
    that nothing of the calibration data is kept. Published code takes the mean magnitude, and
    leaves out the clip of queries and keys; here a clip has to lower the error of the whole row.

    Before:  y = rms_norm(x, g);       linear(y, w)
    After:   y = rms_norm(x, g / s);   linear(y, w * s)

    Args:
        grid_size: exponents, and parts of the range, that are tried.
        max_shrink: the least part of the range that is tried, as what is taken off.
        clip: search ranges.
        least_gain: by what factor the error must fall for a multiplication at run time.
    """

    name: ClassVar[str] = "awq"
    paper: ClassVar[str] = "Lin et al. 2023, AWQ, arXiv 2306.00978"
    fits: ClassVar[str] = (
        "linears with weights in integers per row or group, whose inputs are float or quantized to "
        "8 bits at run time"
    )

    grid_size: int = 20
    max_shrink: float = 0.5
    clip: bool = True
    least_gain: float = 1.5

    def sites(self, graph: AlgorithmGraph) -> Iterable[Site]:
        """The first linear of each input, with all of them; then every weight, to be clipped."""
        readers: dict[Node, list[Node]] = {}
        for linear in graph.calls(LINEAR):
            if _takes_part(graph, linear):
                readers.setdefault(graph.source(linear), []).append(linear)
        for linears in readers.values():
            yield Site(graph, linears[0], "input", tuple(linears))
        # Scales change the rows of linears before them too: all ranges are searched after all.
        for linear in (linear for linears in readers.values() if self.clip for linear in linears):
            yield Site(graph, linear, "weight")

    def statistics(self, site: Site) -> Statistics:
        """The second moments of the input."""
        return InputHessian()

    def apply(self, site: Site, statistics: Statistics | None) -> str:
        """Scale the input of linears, or clip a weight."""
        hessians = gathered_hessians(statistics)
        if site.slot == "weight":
            return self._clip(site, hessians)
        return self._scale(site.graph, site.plan, hessians[0])

    def _scale(self, graph: AlgorithmGraph, linears: Sequence[Node], hessian: Tensor) -> str:
        source = graph.source(linears[0])
        weights = [graph.constant(linear, "weight") for linear in linears]
        operands = [argument(linear, "input") for linear in linears]
        readers = [o if o is not source else n for o, n in zip(operands, linears, strict=True)]
        target = fold_target(graph, source, readers)
        if not isinstance(target, Rows) and is_quantized_output(source):
            raise Declined(f"{source.name} is computed in integers")
        sizes = hessian.diagonal().sqrt()
        if not bool(sizes.any()):
            raise Declined("its input is 0 in all calibration data")
        sizes = sizes.clamp(min=max(float(sizes.max()) / WIDEST, 1e-30))
        exponents = [k / self.grid_size for k in range(self.grid_size + 1)]
        scales = [_centred(sizes**alpha, source.meta["val"].dtype) for alpha in exponents]
        errors = [sum(_error(w, scale, hessian) for w in weights) for scale in scales]
        best = min(range(len(errors)), key=errors.__getitem__)
        needed = self.least_gain if isinstance(target, str) else 1.0
        if not errors[0] > needed * errors[best]:
            raise Declined("no scale of its channels lowers the output error enough")
        divide_inputs(graph, target, scales[best], source=source, linears=linears, by=self.name)
        gain = _gain(errors[0], errors[best])
        step = f"awq: / rms ** {exponents[best]:g} per channel: {gain:.1f} dB less output error"
        for linear in linears:
            graph.constant(linear, "weight").note(step)
        return step

    def _clip(self, site: Site, hessians: Tensor) -> str:
        weight = site.graph.constant(site.node, "weight", keeps_qparams=True)
        before, after = self._clip_one(WeightBlocks.of(weight, hessians))
        if not after < before:
            raise Declined("no clipped range lowers the output error")
        step = f"awq: ranges clipped: {_gain(before, after):.1f} dB less output error"
        weight.note(step)
        return step

    def _clip_one(self, found: WeightBlocks) -> tuple[float, float]:
        """Take the part of each block's range with the least error; the error before and after."""
        blocks, hessians = found.blocks, found.block_hessians
        limits = found.qparams.quant_min, found.qparams.quant_max
        best, best_zero = found.clipped(1.0)
        least = torch.full_like(best, torch.inf)
        for step in range(int(self.max_shrink * self.grid_size)):
            scale, zero = found.clipped(1 - step / self.grid_size)
            codes = (blocks / scale).round_().add_(zero).clamp_(*limits)
            error = output_errors(codes.sub_(zero).mul_(scale).sub_(blocks), hessians)[..., None]
            best = torch.where(error < least, scale, best)
            best_zero = torch.where(error < least, zero, best_zero)
            least = torch.minimum(error, least)
        return found.take(best, best_zero)


def _takes_part(graph: AlgorithmGraph, linear: Node) -> bool:
    observer = graph.observer(argument(linear, "weight"))
    if not has_integers(observer) or hasattr(observer, "block_qparams"):
        return False
    given = graph.observer(argument(linear, "input"))
    if given is None:
        return True
    dtype = getattr(given, "target_dtype", None) or given.dtype
    is_integer = not dtype.is_floating_point
    is_wide = is_integer and getattr(given, "quant_max", None) in (None, 127, 255)
    return bool(getattr(given, "is_dynamic", False)) and is_wide


def _centred(scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Around 1; in half precision the nearest powers of two, which multiply without rounding."""
    scale = scale / (scale.max() * scale.min()).sqrt()
    return scale if dtype.itemsize >= 4 else torch.exp2(scale.log2().round())


def _error(weight: Constant, scale: Tensor, hessian: Tensor) -> float:
    """The output error of a weight rounded with its columns scaled, of a sample of its rows."""
    value = weight.value
    rows = torch.linspace(0, len(value) - 1, min(len(value), MOST_ROWS)).long()
    scaled = value[rows].float() * scale
    wrong = (weight.grid(scaled).nearest(scaled) - scaled) / scale
    return float(output_errors(wrong, hessian).sum())


def _gain(before: float, after: float) -> float:
    return 10 * log10(before / max(after, 1e-30))

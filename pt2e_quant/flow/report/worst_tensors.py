"""The quantized tensors that lose most by their own rounding: the first places to look."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.core.errors import Pt2eQuantWarning, module_path, source_line
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qdq import float_name, is_dequantize, is_quantize
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.sample import Sample

LOW_DB = 15.0
"""Below this SQNR against float, a result has lost more than a fifth of its amplitude to noise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorLoss:
    """The loss of one tensor by its own rounding.

    Args:
        name: of the node that makes it, or of the constant.
        module: dotted path of its module, "" at the root.
        sqnr_db: of its dequantized values against the values before, the median over channels: one
            channel of great values hides in the sum what it costs the others. Of constants an
            estimate from their steps (uniform rounding noise, step²/12): their floats are gone.
    """

    name: str
    module: str
    sqnr_db: float


def worst_tensors(gm: GraphModule, sample: Sample, count: int = 5) -> list[TensorLoss]:
    """The tensors of a q/dq graph with the least SQNR by their own rounding, the worst first.

    Args:
        gm: a canonical graph; its buffers are as before.
        sample: the call that is run once.
        count: how many at most.
    """
    return _least(_watched(gm, sample), count)


def _watched(gm: GraphModule, sample: Sample) -> "_Watcher":
    watcher = _Watcher(gm)
    leaves = [v.clone() if isinstance(v, Tensor) else v for v in sample.leaves]
    with torch.no_grad(), preserve_buffers(gm, capture_of(gm)):
        watcher.run(*capture_of(gm).positional(leaves))
    return watcher


def _least(watcher: "_Watcher", count: int) -> list[TensorLoss]:
    return sorted(watcher.losses.values(), key=lambda loss: loss.sqnr_db)[:count]


def warn_if_low(gm: GraphModule, sample: Sample, ratio_db: float | None) -> None:
    """Warn of a q/dq graph that is far from its float model.

    Args:
        gm: the canonical graph.
        sample: the call that it was measured on.
        ratio_db: its SQNR against the float model there; None if that is not known.

    Warns:
        Pt2eQuantWarning: below LOW_DB, naming the worst tensors; and of NaN in its results, naming
            where that begins.
    """
    if ratio_db is None or ratio_db >= LOW_DB:
        return
    watcher = _watched(gm, sample)
    what = f"is at {ratio_db:.1f} dB SQNR from the float model on the first batch"
    if math.isnan(ratio_db) and (node := watcher.first_nan) is not None:
        place = source_line(node) or module_path(node)
        what = (
            "gives NaN on the first batch, where the float model gives numbers, from "
            f"{node.name}{f' ({place})' if place else ''} on"
        )
    worst = _least(watcher, 5)
    named = f"; by their own rounding the worst tensors have: {_listed(worst)}" if worst else ""
    warnings.warn(
        f"the quantized graph {what}{named}. Give calibration data like the data it will see, "
        'leave their modules float (quantizer.set_module_name("…", None), --keep-float), or '
        "choose a recipe with more bits",
        Pt2eQuantWarning,
        stacklevel=3,
    )


def _has_nan(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(value.isnan().any())


def _listed(losses: Sequence[TensorLoss]) -> str:
    return ", ".join(
        f"{loss.name}{f' ({loss.module})' if loss.module else ''} {loss.sqnr_db:.1f} dB"
        for loss in losses
    )


def by_channel(tensor: Tensor, axis: int | None = None) -> Tensor:
    """A tensor as [channels, values]; by default channels are axis 1 of images, else the last."""
    if tensor.dim() < 2:
        return tensor.reshape(1, -1)
    if axis is None:
        axis = 1 if tensor.dim() >= 4 else -1
    return tensor.movedim(axis, 0).flatten(1)


def as_read(value: Tensor, record: TensorRecord | None) -> Tensor:
    """A tensor as its readers see it: observed values that they do not tell apart are one."""
    if record is None or record.read_range is None:
        return value
    read = value.clamp(*record.read_range)
    if record.observed is None:
        return read
    # Beyond what calibration saw, nothing is known of the readers.
    return torch.where((value < record.observed[0]) | (value > record.observed[1]), value, read)


def median_db(signal: Tensor, noise: Tensor) -> float:
    """The median over channels of the SQNR, of those that have signal and noise; inf of none."""
    ratios = 10 * torch.log10(signal / noise)
    told = ratios[(signal > 0) & (noise > 0)]
    return float(told.median()) if told.numel() else math.inf


def _by_channel_db(real: Tensor, found: Tensor) -> float:
    """The median over channels of the SQNR."""
    a, b = by_channel(real.double()), by_channel(found.double())
    return median_db(a.square().sum(1), (a - b).square().sum(1))


class _Watcher(Interpreter):
    """Runs a graph, and compares each dequantized tensor with what was quantized."""

    def __init__(self, gm: GraphModule) -> None:
        # Values stay until the end: a quantized one is compared behind its last reader.
        super().__init__(gm, garbage_collect_values=False)
        self.losses: dict[str, TensorLoss] = {}
        self.first_nan: Node | None = None
        self.records = provenance_of(gm).by_name()

    def run_node(self, n: Node) -> Any:
        """Run one node; keep the loss of a dequantize, and the first node that makes NaN."""
        made = super().run_node(n)
        if self.first_nan is None and _has_nan(made):
            self.first_nan = n
        if is_dequantize(n) and isinstance(made, Tensor):
            integers = n.args[0]
            assert isinstance(integers, Node)
            if is_quantize(integers) and isinstance(integers.args[0], Node):
                source = integers.args[0]
                record = self.records.get(source.name)
                real, found = (as_read(value, record) for value in (self.env[source], made))
                self._keep(source.name, source, _by_channel_db(real, found))
            elif (step := self._step(n)) is not None:
                name = float_name(integers) if integers.op == "get_attr" else integers.name
                signal = float(made.double().square().mean())
                noise = float(step.double().square().mean()) / 12
                ratio = 10 * math.log10(signal / noise) if signal and noise else math.inf
                self._keep(name, n, ratio)
        return made

    def _keep(self, name: str, node: Node, ratio: float) -> None:
        found = TensorLoss(name=name, module=module_path(node), sqnr_db=ratio)
        if name not in self.losses or ratio < self.losses[name].sqnr_db:
            self.losses[name] = found

    def _step(self, node: Node) -> Tensor | None:
        """The scale of a dequantize; None if it has no numbers of that name."""
        if len(node.args) < 2:
            return None
        scale = node.args[1]
        value = self.env.get(scale) if isinstance(scale, Node) else scale
        if isinstance(value, float):
            return torch.tensor(value)
        return value if isinstance(value, Tensor) and value.is_floating_point() else None

"""The values of quantized tensors: histograms, the range chosen, the loss by rounding."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.errors import InvariantError, module_path
from pt2e_quant.core.json_text import json_text
from pt2e_quant.core.provenance import TensorRecord, provenance_of
from pt2e_quant.core.qdq import is_quantize, read_qparams
from pt2e_quant.core.read_capture import capture_of
from pt2e_quant.flow.calibrate.calibrate import preserve_buffers
from pt2e_quant.flow.calibrate.pick_inputs import InputPick, bind_batch
from pt2e_quant.flow.calibrate.sample import Sample, copied
from pt2e_quant.flow.report.page.plot import COLOURS, figure, graph_objects
from pt2e_quant.flow.report.page.section import DataTable, Section
from pt2e_quant.flow.report.page.write_page import notebook_html
from pt2e_quant.flow.report.rows import kind_of
from pt2e_quant.flow.report.worst_tensors import TensorLoss, as_read, worst_tensors

BINS = 80

VERSION = 1
"""Version of the JSON that `TensorTable.to_json` writes."""


@dataclass(slots=True, kw_only=True)
class TensorValues:
    """The values of one quantized tensor before it is quantized.

    Args:
        name: of the node that makes it.
        module: dotted path of its module.
        chosen: (least, greatest) value that its integers stand for; None where the scale is chosen
            at run time.
        step: its scale, 0 where that is chosen at run time.
        seen: (least, greatest) value of all batches.
        edges: of the bins, one more than there are counts.
        counts: values in each bin; those beyond the edges are in the first and the last one.
        clipped: how many values lie outside of the chosen range, of those that the tensor's
            readers tell apart.
        total: how many there are.
    """

    name: str
    module: str = ""
    chosen: tuple[float, float] | None = None
    step: float = 0.0
    seen: tuple[float, float] = (0.0, 0.0)
    edges: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    clipped: int = 0
    total: int = 0

    @property
    def share_clipped(self) -> float:
        """The share of values outside of the chosen range."""
        return self.clipped / self.total if self.total else 0.0

    @property
    def share_used(self) -> float | None:
        """The share of the chosen range that values lie in; None where none was chosen."""
        if self.chosen is None or self.chosen[1] <= self.chosen[0]:
            return None
        inside = min(self.chosen[1], self.seen[1]) - max(self.chosen[0], self.seen[0])
        return max(0.0, inside) / (self.chosen[1] - self.chosen[0])

    def figure(self) -> Any:
        """The histogram, with the chosen range shaded: a plotly figure."""
        centres = [(a + b) / 2 for a, b in zip(self.edges, self.edges[1:], strict=False)]
        bars = graph_objects().Bar(
            x=centres, y=self.counts, marker={"color": COLOURS["line"]}, name="values"
        )
        text = f"{self.name}: {100 * self.share_clipped:.3g} % clipped"
        made = figure([bars], title={"text": text}, bargap=0, showlegend=False)
        made.update_yaxes(type="log", title={"text": "values"})
        made.update_xaxes(title={"text": self.module or self.name})
        if self.chosen is not None:
            low, high = self.chosen
            shade = {"fillcolor": COLOURS["good"], "opacity": 0.15, "line_width": 0}
            made.add_vrect(x0=low, x1=high, **shade)
            for at in self.chosen:
                made.add_vline(x=at, line={"color": COLOURS["bad"], "dash": "dash", "width": 1.5})
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTable:
    """The quantized tensors of a graph on some batches, for pages and notebooks.

    Args:
        values: the activations, in graph order.
        losses: what rounding costs each tensor, weights too, the worst first.
        records: their records.
    """

    values: tuple[TensorValues, ...]
    losses: tuple[TensorLoss, ...]
    records: tuple[TensorRecord, ...]

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each tensor, the one that loses most first, by the columns of `table`."""
        table = self.table()
        return [dict(zip(table.columns, row, strict=True)) for row in table.rows]

    def to_json(self) -> str:
        """Return JSON with the histograms; infinity and NaN, which JSON lacks, are null."""
        values = [asdict(value) for value in self.values]
        return json_text({"version": VERSION, "tensors": self.to_dicts(), "values": values})

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each tensor.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def sections(self) -> list[Section]:
        """The table of losses and the histograms, both with the worst tensor first."""
        values = {value.name: value for value in self.values}
        worst = [loss.name for loss in self.losses if loss.name in values]
        return [
            Section(
                title="What the tensors hold",
                text="SQNR of each tensor's own rounding, the median over its channels. Weights "
                "are estimated from their steps. A row shows its histogram.",
                table=self.table(),
                figures={name: values[name].figure for name in dict.fromkeys((*worst, *values))},
                rank=12,
            )
        ]

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        return notebook_html(self.sections())

    def table(self) -> DataTable:
        """A row for each tensor, the one that loses most first."""
        values = {value.name: value for value in self.values}
        records = {record.name: record for record in self.records}
        columns = ("tensor", "own SQNR dB", "clipped %", "range used %", "type", "module")
        rows = []
        for loss in self.losses:
            value, record = values.get(loss.name), records.get(loss.name)
            used = value.share_used if value is not None else None
            clipped = None if value is None else 100 * value.share_clipped
            kind = kind_of(record) if record is not None else ""
            share = None if used is None else 100 * used
            rows.append((loss.name, loss.sqnr_db, clipped, share, kind, loss.module))
        return DataTable(columns=columns, rows=tuple(rows), sort_by=1, picks=0, is_one_line=True)


def tensor_values(
    gm: GraphModule, batches: Iterable[Any], *, inputs: InputPick | None = None
) -> TensorTable:
    """Run batches through a converted graph, and keep what its quantized tensors hold.

    Bins lie over the range chosen and what the first batch holds.

    Args:
        gm: a converted graph; its buffers are as before.
        batches: as `calibrate` takes them. Memory does not grow with their number.
        inputs: what of each batch the model takes, as `calibrate` has it.
    """
    watcher = _Watcher(gm)
    capture = capture_of(gm)
    losses: Sequence[TensorLoss] = ()
    with torch.no_grad(), preserve_buffers(gm, capture):
        for batch in batches:
            leaves = bind_batch(capture, batch, inputs, call="tensor_values")
            if not losses:
                sample = Sample(leaves=tuple(copied(leaves)), float_outputs=None)
                losses = worst_tensors(gm, sample, count=len(gm.graph.nodes))
            watcher.run(*capture.positional(copied(leaves)))
    return TensorTable(
        values=tuple(watcher.values.values()),
        losses=tuple(losses),
        records=tuple(provenance_of(gm).tensors),
    )


class _Watcher(Interpreter):
    """Counts the values in front of every quantize."""

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.gm = gm
        self.values: dict[str, TensorValues] = {}
        self.records = provenance_of(gm).by_name()

    def run_node(self, n: Node) -> Any:
        """Run one node."""
        if is_quantize(n) and isinstance(n.args[0], Node):
            value = self.env.get(n.args[0])
            if isinstance(value, Tensor) and value.numel():
                self._add(n, n.args[0], value.detach().float())
        return super().run_node(n)

    def _add(self, quantize: Node, source: Node, value: Tensor) -> None:
        kept = value[value.isfinite() & (value.abs() < torch.finfo(torch.float32).max / 2)]
        if not kept.numel():
            return
        low, high = (float(edge) for edge in torch.aminmax(kept))
        found = self.values.get(source.name)
        if found is None:
            found = self.values[source.name] = self._made(quantize, source, (low, high))
        found.seen = min(found.seen[0], low), max(found.seen[1], high)
        found.total += kept.numel()
        if found.chosen is not None:
            low, high = found.chosen[0] - found.step / 2, found.chosen[1] + found.step / 2
            read = as_read(kept, self.records.get(source.name))
            outside = (read < low) | (read > high)
            found.clipped += int(outside.sum())
        edges = found.edges
        counts = torch.histc(kept.clamp(edges[0], edges[-1]), BINS, edges[0], edges[-1])
        found.counts = [a + int(b) for a, b in zip(found.counts, counts, strict=True)]

    def _made(self, quantize: Node, source: Node, seen: tuple[float, float]) -> TensorValues:
        chosen, step = self._chosen(quantize)
        first, last = seen
        if chosen is not None:
            first, last = min(first, chosen[0]), max(last, chosen[1])
        if last <= first:
            first, last = first - 0.5, last + 0.5
        width = (last - first) / BINS
        return TensorValues(
            name=source.name,
            module=module_path(source),
            chosen=chosen,
            step=step,
            seen=seen,
            edges=[*(first + width * at for at in range(BINS)), last],
            counts=[0] * BINS,
        )

    def _chosen(self, quantize: Node) -> tuple[tuple[float, float] | None, float]:
        """The range and the scale of a static quantize of a whole tensor."""
        try:
            qparams = read_qparams(self.gm, quantize)
        except InvariantError:  # chosen at run time
            return None, 0.0
        if qparams.scale.numel() != 1:
            return None, 0.0
        scale, zero = float(qparams.scale), float(qparams.zero_point)
        return (scale * (qparams.quant_min - zero), scale * (qparams.quant_max - zero)), scale

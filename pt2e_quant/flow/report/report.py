"""The report: what was quantized, what was not and why, sizes, and what the backend made of it."""

import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pt2e_quant.core.data_frame import data_frame
from pt2e_quant.core.json_text import json_text
from pt2e_quant.core.provenance import FloatRecord, Provenance, SizeRecord, TensorRecord
from pt2e_quant.flow.report.page.plot import size_treemap
from pt2e_quant.flow.report.page.section import Cell, DataTable, HasSections, Section
from pt2e_quant.flow.report.page.write_page import notebook_html, write_page
from pt2e_quant.flow.report.rows import (
    alike,
    choices_of,
    float_lines,
    joined_notes,
    kind_of,
    shared_name,
)


@dataclass(slots=True, kw_only=True)
class FloatRegion:
    """A part of the artifact that the backend does not run in integers, and what it costs.

    Args:
        node: where it is.
        what: the operators that are left.
        reason: why.
        cost: what it costs, as text ("1 dequantize of 12544 elements").
    """

    node: str
    what: str
    reason: str
    cost: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything worth knowing of one artifact; prints as tables.

    Args:
        backend: its name.
        provenance: the table of tensors and nodes.
        integer_ops: operators that run in integers, by name, counted in the artifact itself.
        float_ops: operators that run in float, likewise.
        float_regions: what was left float inside the artifact, with reasons.
        notes: other things the user should know ("link the quantized kernels").
        inputs: the sizes that each input takes, a line each.
        sqnr_canonical_db: artifact against the canonical graph on the sample.
        sqnr_float_db: canonical graph against the float graph on the sample.
        call_us: the least microseconds of a call on this machine; None where it was not measured.
        float_call_us: likewise of the float program, lowered by the same backend.
        size_bytes: of the artifact.
        float_size_bytes: of the float constants of the model.
    """

    backend: str
    provenance: Provenance
    integer_ops: dict[str, int] = field(default_factory=dict)
    float_ops: dict[str, int] = field(default_factory=dict)
    float_regions: list[FloatRegion] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    sqnr_canonical_db: float | None = None
    sqnr_float_db: float | None = None
    call_us: float | None = None
    float_call_us: float | None = None
    size_bytes: int = 0
    float_size_bytes: int = 0

    def __post_init__(self) -> None:
        """Read the size of the float constants off the table, where it is not given."""
        if not self.float_size_bytes:
            self.float_size_bytes = self.provenance.float_bytes

    def note_record(self, kept: Provenance) -> None:
        """Say what the file does not keep of the table, if anything."""
        if kept.lacks and kept.lacks not in self.notes:
            self.notes.append(kept.lacks)

    def to_json(self) -> str:
        """The report as JSON; infinity and NaN, which JSON lacks, are null."""
        return json_text(asdict(self))

    def to_dicts(self) -> list[dict[str, Any]]:
        """A dict for each quantized tensor."""
        return [asdict(record) for record in self.provenance.tensors]

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each quantized tensor.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return data_frame(self.to_dicts())

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=120, no_color=True)
        for table in self.tables():
            console.print(table)
        for note in joined_notes([*self.notes, *self.provenance.notes]):
            console.print(f"note: {note}", soft_wrap=True)
        return stream.getvalue()

    def to_html(self, path: str | Path, *parts: HasSections) -> None:
        """Write one file of HTML, with its pictures, that needs no network and nothing beside it.

        Args:
            path: of the .html file.
            parts: what else it shows: a comparison, a profile, a search; see `pq.write_page`.

        Raises:
            ArtifactError: the path cannot be written.
            MissingExtraError: plotly is not installed.
        """
        sections = [*self.sections(), *(s for part in parts for s in part.sections())]
        write_page(path, f"Quantized for {self.backend}", sections)

    def sections(self) -> list[Section]:
        """The parts of a page: summary, sizes, quantized tensors, what is float, notes."""
        return [
            Section(title="Summary", facts=tuple(self._facts()), rank=0),
            *record_sections(self.provenance, self.backend),
            *self._float_sections(),
        ]

    def _float_sections(self) -> list[Section]:
        notes = tuple(joined_notes([*self.notes, *self.provenance.notes]))
        regions = [(r.node, r.what, r.reason, r.cost) for r in self.float_regions]
        found = []
        if regions:
            table = DataTable(columns=("node", "what", "reason", "cost"), rows=tuple(regions))
            found.append(Section(title="Not run in integers", table=table, rank=72))
        if notes:
            table = DataTable(columns=("note",), rows=tuple((note,) for note in notes))
            found.append(Section(title="Notes", table=table, rank=90))
        return found

    def _repr_html_(self) -> str:
        """For notebooks."""
        return notebook_html(self.sections()[:1]) + notebook_html(self.sections()[1:], rows=5)

    def tables(self) -> list[Table]:
        """The tables that make up the report."""
        found = [self._summary()]
        if self.provenance.tensors:
            found.append(_tensors(self.provenance.tensors))
        if self.provenance.floats:
            found.append(_floats(self.provenance.floats, self.backend))
        if self.provenance.sizes:
            found.append(_sizes(self.provenance.sizes))
        if self.float_regions:
            found.append(_float_regions(self.float_regions))
        return found

    def _summary(self) -> Table:
        table = Table(title=f"{self.backend}: summary", show_header=False)
        for label, value in self._facts():
            table.add_row(label, value)
        return table

    def _facts(self) -> list[tuple[str, str]]:
        facts = [
            ("integer operators", _counts(self.integer_ops)),
            ("float operators", _counts(self.float_ops)),
            ("quantized tensors", str(len(self.provenance.tensors))),
            ("nodes left float", str(len(self.provenance.floats))),
        ]
        if self.inputs:
            facts.append(("inputs", "\n".join(self.inputs)))
        if self.size_bytes:
            text = f"{self.size_bytes:,} bytes"
            if self.float_size_bytes:
                ratio = self.size_bytes / self.float_size_bytes
                text += f", {ratio:.2f}x the float constants ({self.float_size_bytes:,})"
            facts.append(("size", text))
        facts += _size_facts(self.provenance.sizes)
        if self.sqnr_float_db is not None:
            facts.append(("canonical graph against float", f"{self.sqnr_float_db:.1f} dB"))
        if self.sqnr_canonical_db is not None:
            facts.append(("artifact against canonical", f"{self.sqnr_canonical_db:.1f} dB"))
        if self.call_us and self.float_call_us:
            times = f"{self.call_us:,.0f} us a call, {self.float_call_us:,.0f} us in float"
            ratio = self.float_call_us / self.call_us
            facts.append(("speed on this machine", f"{ratio:.2f}x float ({times})"))
        return facts


def _counts(ops: dict[str, int]) -> str:
    if not ops:
        return "none"
    listed = ", ".join(f"{count} {name}" for name, count in sorted(ops.items()))
    return f"{sum(ops.values())}: {listed}"


def _tensors(records: list[TensorRecord]) -> Table:
    """Quantized tensors; those of repeated layers that differ in numbers alone on one line."""
    names = ("tensor", "count", "role", "type", "scale", "range seen")
    columns = (*names, "range chosen", "bytes", "rule")
    rows = []
    for group in alike(records, _sameness):
        first = group[0]
        name = first.name if len(group) == 1 else shared_name(first.name)
        size = f"{_total(group, 'size_before'):,} -> {_total(group, 'size_after'):,}"
        rule = "; ".join([first.rule, *first.steps])
        cells = (
            name,
            _count(group),
            first.role,
            kind_of(first),
            _scales([scale for record in group for scale in record.scale]),
            _seen_range(group),
            choices_of(group),
            size if first.size_after else "",
            rule,
        )
        rows.append(cells)
    return _table("quantized tensors", columns, rows)


def _count(group: Sequence[object]) -> str:
    return str(len(group)) if len(group) > 1 else ""


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns that are empty in every row."""
    kept = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    table = Table(title=title)
    for i in kept:
        table.add_column(columns[i], overflow="fold")
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


def _sameness(record: TensorRecord) -> object:
    name = shared_name(record.name)
    return name, record.role, kind_of(record), record.rule, tuple(record.steps), record.size_after


def _total(group: Sequence[TensorRecord | SizeRecord], field: str) -> int:
    return sum(int(getattr(record, field)) for record in group)


def _scales(scales: list[float]) -> str:
    if len(scales) < 2:
        return "".join(f"{scale:.4g}" for scale in scales)
    return f"{min(scales):.3g}…{max(scales):.3g} x{len(scales)}"


def _seen_range(group: list[TensorRecord]) -> str:
    observed = [record.observed for record in group if record.observed is not None]
    if not observed:
        return ""
    return f"{min(low for low, _ in observed):.4g}…{max(high for _, high in observed):.4g}"


def _floats(records: list[FloatRecord], backend: str) -> Table:
    """Nodes left float, those of one reason on one line."""
    found = float_lines(records, backend)
    rows = [(row.reason, str(row.count), row.operators, row.nodes) for row in found]
    return _table("left float", ("reason", "count", "operators", "nodes"), rows)


def _size_facts(records: list[SizeRecord]) -> list[tuple[str, str]]:
    """The bytes of all constants, and the bits of an element of the quantized ones."""
    if not records:
        return []
    before = sum(r.size_before for r in records if r.size_after)
    after = sum(r.size_after + r.qparams for r in records)
    text = f"{before:,} -> {after:,} bytes"
    quantized = [r for r in records if r.readers]
    if elements := sum(r.elements for r in quantized):
        bits = 8 * sum(r.size_after + r.qparams for r in quantized) / elements
        text += f", {bits:.2f} bits per quantized weight"
    rows = [("constants of the graph", text)]
    if wasted := sum(r.size_after + r.qparams for r in records if r.same_as):
        rows.append(("stored twice", f"{wasted:,} bytes"))
    return rows


def _sizes(records: list[SizeRecord]) -> Table:
    """The size ledger, largest first; repeated layers on one line."""
    numbers = ("elements", "bytes", "qparams", "bits each")
    columns = ("constant", "count", "stored as", *numbers, "note")
    rows = []
    for group in alike(sorted(records, key=lambda r: -r.size_before), _same_size):
        first = group[0]
        note = f"{first.readers} readers" if first.readers > 1 else ""
        if first.same_as:
            note = f"the same values as {first.same_as}"
        before, after = _total(group, "size_before"), _total(group, "size_after")
        qparams = _total(group, "qparams")
        cells = (
            first.name if len(group) == 1 else shared_name(first.name),
            _count(group),
            first.dtype,
            f"{_total(group, 'elements'):,}",
            f"{before:,} -> {after:,}" if first.readers else f"{before:,}",
            f"{qparams:,}" if qparams else "",
            f"{first.bits_per_element:.2f}",
            note,
        )
        rows.append(cells)
    return _table("constants", columns, rows)


def _same_size(record: SizeRecord) -> object:
    name = shared_name(record.name)
    return name, record.dtype, record.elements, record.qparams, record.readers, record.same_as


def _float_regions(float_regions: list[FloatRegion]) -> Table:
    rows = [
        (float_region.node, float_region.what, float_region.reason, float_region.cost)
        for float_region in float_regions
    ]
    columns = ("node", "what", "reason", "cost")
    return _table("not run in integers by the backend", columns, rows)


def record_sections(provenance: Provenance, backend: str) -> list[Section]:
    """The sections of a provenance; those that would be empty are left out.

    Args:
        provenance: of an artifact or a converted graph.
        backend: its name, left out of reasons.
    """
    found = []
    if provenance.sizes:
        found.append(
            Section(
                title="Sizes",
                text="Every constant as it is stored, with its scales and zero points.",
                table=_size_data(provenance.sizes),
                figures={"bytes by module": partial(size_treemap, provenance.sizes)},
                rank=60,
            )
        )
    if provenance.tensors:
        table = _tensor_data(provenance.tensors)
        found.append(Section(title="Quantized tensors", table=table, rank=65))
    if provenance.floats:
        rows = [
            (r.count, r.reason, r.operators, r.nodes)
            for r in float_lines(provenance.floats, backend)
        ]
        table = DataTable(
            columns=("count", "reason", "operators", "nodes"),
            rows=tuple(rows),
            sort_by=0,
            is_descending=True,
        )
        found.append(Section(title="Left float", table=table, rank=70))
    return found


def _size_data(records: Sequence[SizeRecord]) -> DataTable:
    columns = ("constant", "stored as", "elements", "bytes in float", "bytes", "bits each")
    rows = [
        (r.name, r.dtype, r.elements, r.size_before, r.size_after + r.qparams, r.bits_per_element)
        for r in records
    ]
    return DataTable(columns=columns, rows=tuple(rows), sort_by=4, is_descending=True)


def _tensor_data(records: Sequence[TensorRecord]) -> DataTable:
    names = ("tensor", "module", "role", "type", "scale")
    columns = (*names, "least seen", "greatest seen", "range chosen", "rule")
    return DataTable(columns=columns, rows=tuple(_tensor_cells(record) for record in records))


def _tensor_cells(record: TensorRecord) -> tuple[Cell, ...]:
    low, high = record.observed if record.observed is not None else (None, None)
    rule = "; ".join([record.rule, *record.steps])
    scale = max(record.scale) if record.scale else None
    first = record.name, record.module, record.role, kind_of(record)
    return (*first, scale, low, high, record.evidence, rule)

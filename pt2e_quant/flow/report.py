"""The report: what was quantized, what was not and why, sizes, and what the backend made of it."""

import io
import json
from collections import Counter
from dataclasses import asdict, dataclass, field

from rich.console import Console
from rich.table import Table

from pt2e_quant.core.provenance import FloatRecord, Provenance, SizeRecord, TensorRecord

__all__ = ["Island", "Report"]


@dataclass(slots=True, kw_only=True)
class Island:
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
        islands: what was left float inside the artifact, with reasons.
        notes: other things the user should know ("link the quantized kernels").
        sqnr_canonical_db: artifact against the canonical graph on the sample.
        sqnr_float_db: canonical graph against the float graph on the sample.
        size_bytes: of the artifact.
        float_size_bytes: of the float constants of the model.
    """

    backend: str
    provenance: Provenance
    integer_ops: dict[str, int] = field(default_factory=dict)
    float_ops: dict[str, int] = field(default_factory=dict)
    islands: list[Island] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sqnr_canonical_db: float | None = None
    sqnr_float_db: float | None = None
    size_bytes: int = 0
    float_size_bytes: int = 0

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=120, no_color=True)
        for table in self.tables():
            console.print(table)
        for note in [*self.notes, *self.provenance.notes]:
            console.print(f"note: {note}", soft_wrap=True)
        return stream.getvalue()

    def tables(self) -> list[Table]:
        """The tables that make up the report."""
        found = [self._summary()]
        if self.provenance.tensors:
            found.append(_tensors(self.provenance.tensors))
        if self.provenance.floats:
            found.append(_floats(self.provenance.floats))
        if self.provenance.sizes:
            found.append(_sizes(self.provenance.sizes))
        if self.islands:
            found.append(_islands(self.islands))
        return found

    def _summary(self) -> Table:
        table = Table(title=f"{self.backend}: summary", show_header=False)
        for label, value in self._facts():
            table.add_row(label, value)
        return table

    def _facts(self) -> list[tuple[str, str]]:
        rows = [
            ("integer operators", _counts(self.integer_ops)),
            ("float operators", _counts(self.float_ops)),
            ("quantized tensors", str(len(self.provenance.tensors))),
            ("nodes left float", str(len(self.provenance.floats))),
        ]
        if self.size_bytes:
            text = f"{self.size_bytes:,} bytes"
            if self.float_size_bytes:
                ratio = self.size_bytes / self.float_size_bytes
                text += f", {ratio:.2f}x the float constants ({self.float_size_bytes:,})"
            rows.append(("size", text))
        rows += _size_facts(self.provenance.sizes)
        if self.sqnr_float_db is not None:
            rows.append(("canonical graph against float", f"{self.sqnr_float_db:.1f} dB"))
        if self.sqnr_canonical_db is not None:
            rows.append(("artifact against canonical", f"{self.sqnr_canonical_db:.1f} dB"))
        return rows


def _counts(ops: dict[str, int]) -> str:
    if not ops:
        return "none"
    listed = ", ".join(f"{count} {name}" for name, count in sorted(ops.items()))
    return f"{sum(ops.values())}: {listed}"


def _tensors(records: list[TensorRecord]) -> Table:
    table = Table(title="quantized tensors")
    for column in ("tensor", "role", "type", "scale", "range seen", "bytes", "rule"):
        table.add_column(column, overflow="fold")
    for record in records:
        kind = f"{record.dtype}[{record.quant_min},{record.quant_max}]"
        if record.axis is not None:
            kind += f" axis {record.axis}"
        seen = (
            "" if record.observed is None else f"{record.observed[0]:.4g}…{record.observed[1]:.4g}"
        )
        scale = f"{record.scale[0]:.4g}" if record.scale else ""
        if len(record.scale) > 1:
            scale = f"{min(record.scale):.3g}…{max(record.scale):.3g} x{len(record.scale)}"
        size = f"{record.size_before:,} -> {record.size_after:,}" if record.size_after else ""
        rule = "; ".join([record.rule, *record.steps])
        table.add_row(record.name, record.role, kind, scale, seen, size, rule)
    return table


def _floats(records: list[FloatRecord]) -> Table:
    """Nodes left float, those of one operator and reason on one line."""
    table = Table(title="left float")
    for column in ("operator", "count", "reason", "nodes"):
        table.add_column(column, overflow="fold")
    counts = Counter((r.op, r.reason) for r in records)
    for (op, reason), count in counts.most_common():
        names = [r.node for r in records if (r.op, r.reason) == (op, reason)]
        shown = ", ".join(names[:4]) + (f", … ({count - 4} more)" if count > 4 else "")
        table.add_row(op, str(count), reason, shown)
    return table


def _size_facts(records: list[SizeRecord]) -> list[tuple[str, str]]:
    """What all constants take, and an element of the quantized ones."""
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
    """The size ledger, largest first."""
    table = Table(title="constants")
    for column in ("constant", "stored as", "elements", "bytes", "qparams", "bits each", "note"):
        table.add_column(column, overflow="fold")
    for record in sorted(records, key=lambda r: -r.size_before):
        note = f"{record.readers} readers" if record.readers > 1 else ""
        if record.same_as:
            note = f"the same values as {record.same_as}"
        table.add_row(
            record.name,
            record.dtype,
            f"{record.elements:,}",
            f"{record.size_before:,} -> {record.size_after:,}" if record.readers else "unchanged",
            f"{record.qparams:,}" if record.qparams else "",
            f"{record.bits_per_element:.2f}",
            note,
        )
    return table


def _islands(islands: list[Island]) -> Table:
    table = Table(title="not run in integers by the backend")
    for column in ("node", "what", "reason", "cost"):
        table.add_column(column, overflow="fold")
    for island in islands:
        table.add_row(island.node, island.what, island.reason, island.cost)
    return table

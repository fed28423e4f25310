"""The report: what was quantized, what was not and why, sizes, and what the backend made of it."""

import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from rich.console import Console
from rich.table import Table

from pt2e_quant.core.provenance import FloatRecord, Provenance, SizeRecord, TensorRecord


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
    size_bytes: int = 0
    float_size_bytes: int = 0

    def __post_init__(self) -> None:
        """Read the size of the float constants off the table, where it is not given."""
        if not self.float_size_bytes:
            self.float_size_bytes = self.provenance.float_bytes

    def to_json(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), indent=1)

    def __str__(self) -> str:
        stream = io.StringIO()
        console = Console(file=stream, width=120, no_color=True)
        for table in self.tables():
            console.print(table)
        for note in joined_notes([*self.notes, *self.provenance.notes]):
            console.print(f"note: {note}", soft_wrap=True)
        return stream.getvalue()

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
        rows = [
            ("integer operators", _counts(self.integer_ops)),
            ("float operators", _counts(self.float_ops)),
            ("quantized tensors", str(len(self.provenance.tensors))),
            ("nodes left float", str(len(self.provenance.floats))),
        ]
        if self.inputs:
            rows.append(("inputs", "\n".join(self.inputs)))
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
    """Quantized tensors; those of repeated layers that differ in numbers alone on one line."""
    columns = ("tensor", "count", "role", "type", "scale", "range seen", "bytes", "rule")
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
            _seen(group),
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


def _seen(group: list[TensorRecord]) -> str:
    observed = [record.observed for record in group if record.observed is not None]
    if not observed:
        return ""
    return f"{min(low for low, _ in observed):.4g}…{max(high for _, high in observed):.4g}"


def _floats(records: list[FloatRecord], backend: str) -> Table:
    """Nodes left float, those of one reason on one line."""
    found = float_rows(records, backend)
    rows = [(row.reason, str(row.count), row.operators, row.nodes) for row in found]
    return _table("left float", ("reason", "count", "operators", "nodes"), rows)


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


_T = TypeVar("_T")
_NUMBER = re.compile(r"(?<=[._])\d+(?=[._]|$)")
"""A number between dots or underscores, as modules of a list and repeated operators have it."""


@dataclass(frozen=True, slots=True)
class FloatRow:
    """Nodes that were left float for one reason.

    Args:
        reason: without the names of backend, row and operator.
        count: how many.
        operators: "27 mul, 15 add", the most frequent first.
        nodes: names of the first ones.
    """

    reason: str
    count: int
    operators: str
    nodes: str


def float_rows(records: Sequence[FloatRecord], backend: str) -> list[FloatRow]:
    """One row for each reason, the most frequent first."""
    groups: dict[str, list[FloatRecord]] = {}
    for record in records:
        groups.setdefault(_plain_reason(record, backend), []).append(record)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    return [_float_row(reason, members) for reason, members in ordered]


def _float_row(reason: str, members: list[FloatRecord]) -> FloatRow:
    counts = Counter(r.op.removeprefix("aten.").removesuffix("_") for r in members)
    operators = ", ".join(f"{n} {op}" if n > 1 else op for op, n in counts.most_common())
    nodes = ", ".join(r.node for r in members[:4])
    more = f", … ({len(members) - 4} more)" if len(members) > 4 else ""
    return FloatRow(reason, len(members), operators, nodes + more)


def _plain_reason(record: FloatRecord, backend: str) -> str:
    """A reason without what the row's other columns say.

    >>> record = FloatRecord(node="m", op="aten.mul", module="", reason='A mul: its input "y" is')
    >>> _plain_reason(record, "A")
    'its input is'
    """
    text = re.sub(rf"^{re.escape(backend)} \w+(?=:| needs:)", "", record.reason)
    text = re.sub(r"\bits (input|output|weight|bias) \"\w+\"", r"its \1", text.removeprefix(": "))
    operator = record.op.removeprefix("aten.")
    return re.sub(rf"has no int8 {re.escape(operator)} here", "has no int8 form of it", text)


def alike(records: Sequence[_T], key: Callable[[_T], object]) -> Iterator[list[_T]]:
    """Records of one key, in the order of the first of each."""
    groups: dict[object, list[_T]] = {}
    for record in records:
        groups.setdefault(key(record), []).append(record)
    yield from groups.values()


def joined_notes(notes: Sequence[str]) -> list[str]:
    """Notes "node: text", those of equal text as one.

    >>> joined_notes(["linear: kept", "done", "linear_1: kept"])
    ['linear, linear_1: kept', 'done']
    """
    found = []
    for group in alike([note.partition(": ") for note in notes], lambda parts: parts[2] or parts):
        names, text = [name for name, _, _ in group], group[0][2]
        shown = ", ".join(names[:4]) + (f", … ({len(names) - 4} more)" if len(names) > 4 else "")
        found.append(f"{shown}: {text}" if text else names[0])
    return found


def shared_name(name: str) -> str:
    """A name with a star for each number in it.

    >>> shared_name("layers.11.fc2.weight"), shared_name("relu_3")
    ('layers.*.fc2.weight', 'relu_*')
    """
    return _NUMBER.sub("*", name)


def kind_of(record: TensorRecord) -> str:
    """The type of a quantized tensor: "int8[-127,127] axis 0", "int8 at run time"."""
    blocks = f" in blocks of {record.block}" if record.block else ""
    if record.is_dynamic or record.quant_min == record.quant_max:  # ranges of run time are not kept
        return f"{record.dtype} at run time{blocks}"
    kind = f"{record.dtype}[{record.quant_min},{record.quant_max}]{blocks}"
    if record.axis is not None:
        kind += f" axis {record.axis}"
    if record.group_size is not None:
        kind += f" groups of {record.group_size}"
    return kind

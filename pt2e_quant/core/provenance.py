"""Provenance: one record per quantized tensor, one per node left float, from rule to storage.

Reports, `inspect`, comparison and serialization all read this one table.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from torch.fx import GraphModule

from pt2e_quant.core.errors import ArtifactError, ConfigError, near
from pt2e_quant.core.provenance_table import (
    NumberReader,
    NumberWriter,
    Read,
    Refer,
    from_columns,
    held_nowhere,
    read_nowhere,
    to_columns,
    to_text,
)
from pt2e_quant.core.schemes import Role

PROVENANCE_KEY = "pt2e_quant.provenance"
"""The key of `gm.meta` that holds the table."""

_VERSION = 3


class RecordKind(StrEnum):
    """The part of the table that a lowered file keeps.

    Attributes:
        FULL: all of it.
        BRIEF: what each quantized tensor is, and sizes as a total.
        NONE: sizes as a total.
    """

    FULL = "full"
    BRIEF = "brief"
    NONE = "none"


def record_named(name: str | None) -> RecordKind | None:
    """The kind of a name; None stays None.

    >>> record_named("brief")
    <RecordKind.BRIEF: 'brief'>

    Raises:
        ConfigError: there is none; near names are offered.
    """
    if name is None:
        return None
    try:
        return RecordKind(name)
    except ValueError as error:
        known = list(RecordKind)
        raise ConfigError(f'there is no record "{name}": {near(name, known)}') from error


@dataclass(slots=True, kw_only=True)
class TensorRecord:
    """The record of one quantized tensor, from rule to storage.

    Args:
        name: of the tensor: its producing node, or the parameter's dotted name.
        role: what it is to the operators that use it.
        module: dotted path of the module it belongs to.
        rule: which rule asked for it.
        group: number of the qparam group.
        observer: the observer's class, and its node name in the prepared graph.
        uses: the edges it was asked at: "producer -> consumer", or the node for an output.
        dtype: for example "int8".
        quant_min: smallest integer used.
        quant_max: largest integer used.
        axis: channel axis, None per tensor.
        group_size: how many neighbours share a scale, None if they are not in groups.
        block: lengths of the block that shares a scale (-1: a whole axis), where the fields above
            do not say it.
        scales: how the scales are kept, where they are no float32 numbers.
        is_dynamic: the qparams are chosen at run time.
        scale: real units per integer step; one, or one per channel. Empty where they are many
            (groups: the graph's own constant holds them) or not known (dynamic).
        zero_point: the integer that stands for zero; as many as scale.
        observed: (min, max) that the observer saw.
        read_range: (least, greatest) value that its readers tell apart from those beyond, as far
            as was observed: hardswish reads nothing below -3. None where that is not known.
        steps: algorithm steps applied, in order.
        evidence: which range was chosen by what it costs on calibration data, by how much it is
            better, and what came second; "" where nothing was compared.
        size_before: bytes of the constant in float, 0 for an activation.
        size_after: bytes of the stored integers with their qparams.
    """

    name: str
    role: Role
    module: str = ""
    rule: str = ""
    group: int = -1
    observer: str = ""
    uses: list[str] = field(default_factory=list)
    dtype: str = ""
    quant_min: int = 0
    quant_max: int = 0
    axis: int | None = None
    group_size: int | None = None
    block: list[int] = field(default_factory=list)
    scales: str = ""
    is_dynamic: bool = False
    scale: list[float] = field(default_factory=list)
    zero_point: list[int] = field(default_factory=list)
    observed: tuple[float, float] | None = None
    read_range: tuple[float, float] | None = None
    steps: list[str] = field(default_factory=list)
    evidence: str = ""
    size_before: int = 0
    size_after: int = 0


@dataclass(slots=True, kw_only=True)
class FloatRecord:
    """A node that was left float, and why.

    Args:
        node: its name.
        op: its operator.
        module: dotted path of the module it belongs to.
        reason: why.
        size: bytes of its float constants.
        fix: what to do about the reason, "" where nothing is known.
        is_choice: the backend could run it in integers; float is better for it.
    """

    node: str
    op: str
    module: str
    reason: str
    size: int = 0
    fix: str = ""
    is_choice: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatOperator:
    """One operator that a lowered program, or a quantized graph, computes in float.

    Attributes:
        node: its name in the graph; "" where a runtime's program does not name it.
        operator: as "aten.log"; of a file that was loaded it may be several, as "2 Sigmoid".
        module: dotted path of the module it belongs to, "" at the root.
        source: the user's line, "" if unknown.
        bytes_across: of the float tensors that cross into and out of float here in one inference,
            at the captured sizes; operators that follow each other in float share their border.
            None if the file says nothing of it.
        reason: why it is float.
        remedy: what would make it integer.
    """

    node: str
    operator: str
    module: str
    source: str
    bytes_across: int | None
    reason: str
    remedy: str


@dataclass(slots=True, kw_only=True)
class SizeRecord:
    """The size of one constant of the converted graph.

    Args:
        name: of the parameter it comes from.
        dtype: of its elements as they are stored: "int4" where eight bits hold two.
        elements: how many there are.
        size_before: bytes in float; its own bytes if it is not quantized.
        size_after: bytes of its elements as stored; 0 if another name of the same tensor has them.
        qparams: bytes of the scales and zero points that its dequantizes read.
        readers: how many dequantizes read it; 0 if it is not quantized.
        same_as: an earlier constant that holds the same values in memory of its own, "" if none.
    """

    name: str
    dtype: str
    elements: int
    size_before: int
    size_after: int
    qparams: int = 0
    readers: int = 0
    same_as: str = ""

    @property
    def bits_per_element(self) -> float:
        """Bits that an element takes, qparams included."""
        return 8 * (self.size_after + self.qparams) / self.elements if self.elements else 0.0


@dataclass(slots=True, kw_only=True)
class Provenance:
    """The table: quantized tensors, nodes left float, sizes, the passes that ran, their notes.

    `islands` are the operators that the program of an artifact computes in float; None where no
    program was looked at. `kept` is how much of it the file kept that it was read from.
    """

    quantizer: str = ""
    tensors: list[TensorRecord] = field(default_factory=list)
    floats: list[FloatRecord] = field(default_factory=list)
    islands: list[FloatOperator] | None = None
    sizes: list[SizeRecord] = field(default_factory=list)
    passes: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: RecordKind = RecordKind.FULL

    def tensor(self, name: str) -> TensorRecord | None:
        """The record of a tensor by name."""
        return next((r for r in self.tensors if r.name == name), None)

    def by_name(self) -> dict[str, TensorRecord]:
        """The records of tensors by name; of several with one name the first."""
        return {record.name: record for record in reversed(self.tensors)}

    @property
    def float_bytes(self) -> int:
        """Bytes of the constants in float; what has another name for them counts once."""
        return sum(record.size_before for record in self.sizes if record.size_after)

    def set_floats(self, records: Sequence[FloatRecord]) -> None:
        """Replace the list of nodes left float."""
        self.floats = list(records)

    def kept_as(self, kind: RecordKind) -> "Provenance":
        """The part of the table that a file keeps; the table itself for "full"."""
        if kind is RecordKind.FULL:
            return self
        made = Provenance(quantizer=self.quantizer, sizes=_total(self.sizes), kept=kind)
        if kind is RecordKind.BRIEF:
            made.tensors = [_brief(record) for record in self.tensors]
        return made

    @property
    def lacks(self) -> str:
        """A sentence on the parts that a file did not keep; "" where it kept all."""
        return _LACKS[self.kept]

    def to_json(self, refer: Refer = held_nowhere) -> str:
        """The table as JSON to keep in a file; `refer` finds numbers that the file has anyway."""
        numbers = NumberWriter(refer)
        islands = self.islands and to_columns([_entry(r) for r in self.islands], _ISLAND)
        tensors = [numbers.write(_entry(record)) for record in self.tensors]
        return to_text(
            {
                "version": _VERSION,
                "kept": self.kept,
                "quantizer": self.quantizer,
                "tensors": to_columns(tensors, _TENSOR),
                "floats": to_columns([_entry(r) for r in self.floats], _FLOAT),
                "islands": islands,
                "sizes": to_columns([_entry(r) for r in self.sizes], _SIZE),
                "numbers": numbers.text(),
                "passes": self.passes,
                "notes": self.notes,
            }
        )

    @staticmethod
    def from_json(text: str, read: Read = read_nowhere) -> "Provenance":
        """Read what `to_json` wrote; `read` gives the numbers that the file holds anyway.

        Raises:
            ArtifactError: the text is not a table, or is of another version.
        """
        try:
            data = json.loads(text)
            version = data.pop("version")
            if version != _VERSION:
                is_newer = version > _VERSION
                raise ArtifactError(
                    f"this file's provenance is of version {version}, expected {_VERSION}",
                    fix="pip install -U pt2e-quant" if is_newer else "quantize the model again",
                )
            numbers = NumberReader(data.pop("numbers"), read)
            islands = data.pop("islands", None)
            entries = (
                numbers.with_numbers(entry) for entry in from_columns(data.pop("tensors"), _TENSOR)
            )
            return Provenance(
                kept=RecordKind(data.pop("kept")),
                tensors=[
                    TensorRecord(**{**entry, "role": Role(entry["role"])}) for entry in entries
                ],
                floats=[FloatRecord(**entry) for entry in from_columns(data.pop("floats"), _FLOAT)],
                islands=islands
                and [FloatOperator(**entry) for entry in from_columns(islands, _ISLAND)],
                sizes=[SizeRecord(**entry) for entry in from_columns(data.pop("sizes"), _SIZE)],
                **data,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError(f"the provenance in this file is damaged: {error}") from error


_TENSOR = TensorRecord(name="", role=Role.INPUT)
_FLOAT = FloatRecord(node="", op="", module="", reason="")
_ISLAND = FloatOperator(
    node="", operator="", module="", source="", bytes_across=0, reason="", remedy=""
)
_SIZE = SizeRecord(name="", dtype="", elements=0, size_before=0, size_after=0)
"""Defaults: a column that has the default in every entry is left out."""

_LACKS = {
    RecordKind.FULL: "",
    RecordKind.BRIEF: "the file keeps a brief record: its quantized tensors with their scales, and "
    "sizes as a total; not which rule asked for them, what observers saw, the evidence, the steps "
    'of algorithms, or what stays float and why (lower(..., record="full") keeps these)',
    RecordKind.NONE: "the file keeps no record of its tensors, sizes are a total "
    '(lower(..., record="brief") keeps their names and scales, record="full" everything)',
}


def _brief(record: TensorRecord) -> TensorRecord:
    """A record of what a tensor is, without how it became so."""
    kept = replace(record, rule="", group=-1, observer="", uses=[], observed=None)
    return replace(kept, read_range=None, steps=[], evidence="")


def _total(sizes: Sequence[SizeRecord]) -> list[SizeRecord]:
    """One record for all of them; none for none."""
    if not sizes:
        return []
    return [
        SizeRecord(
            name="(all constants)",
            dtype="",
            elements=sum(r.elements for r in sizes),
            size_before=sum(r.size_before for r in sizes if r.size_after),
            size_after=sum(r.size_after for r in sizes),
            qparams=sum(r.qparams for r in sizes),
        )
    ]


_MOST_BYTES, _MOST_SHARE = 4096, 0.03
"""The bytes that a record may take by default, and the share of the constants beyond that."""


def _entry(record: Any) -> dict[str, Any]:
    """The fields of a record; their values are shared, as `asdict` copies every number alone."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def choose_record(
    table: Provenance, asked: RecordKind | None, size: Callable[[Provenance], int]
) -> Provenance:
    """Choose how much of a table a file keeps: as asked, else the most that is small enough.

    Args:
        table: the whole.
        asked: by the user; None: at most 4 KB and 3 % of the constants. The islands are left out
            first.
        size: the bytes that a table takes in the file.
    """
    if asked is not None:
        return table.kept_as(asked)
    constants = sum(record.size_after + record.qparams for record in table.sizes)
    most = _MOST_BYTES + _MOST_SHARE * constants
    tables = [table]
    if table.sizes:
        tables += [replace(table, islands=None), *map(table.kept_as, tuple(RecordKind)[1:])]
    return next(one for one in tables if one is tables[-1] or size(one) <= most)


def provenance_of(gm: GraphModule) -> Provenance:
    """The table a graph carries; an empty one is attached if there is none."""
    found = gm.meta.setdefault(PROVENANCE_KEY, Provenance())
    assert isinstance(found, Provenance)
    return found

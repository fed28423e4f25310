"""The provenance of an artifact as parts of a page: sizes, quantized tensors, what is float."""

from collections.abc import Sequence
from functools import partial

from pt2e_quant.core.provenance import Provenance, SizeRecord, TensorRecord
from pt2e_quant.flow.report.page.plot import size_treemap
from pt2e_quant.flow.report.page.section import Cell, DataTable, Section
from pt2e_quant.flow.report.rows import float_rows, kind_of


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
                table=_sizes(provenance.sizes),
                figures={"bytes by module": partial(size_treemap, provenance.sizes)},
                rank=60,
            )
        )
    if provenance.tensors:
        table = _tensors(provenance.tensors)
        found.append(Section(title="Quantized tensors", table=table, rank=65))
    if provenance.floats:
        rows = [
            (r.count, r.reason, r.operators, r.nodes)
            for r in float_rows(provenance.floats, backend)
        ]
        table = DataTable(
            columns=("count", "reason", "operators", "nodes"),
            rows=tuple(rows),
            sort_by=0,
            is_descending=True,
        )
        found.append(Section(title="Left float", table=table, rank=70))
    return found


def _sizes(records: Sequence[SizeRecord]) -> DataTable:
    columns = ("constant", "stored as", "elements", "bytes in float", "bytes", "bits each")
    rows = [
        (r.name, r.dtype, r.elements, r.size_before, r.size_after + r.qparams, r.bits_per_element)
        for r in records
    ]
    return DataTable(columns=columns, rows=tuple(rows), sort_by=4, is_descending=True)


def _tensors(records: Sequence[TensorRecord]) -> DataTable:
    names = ("tensor", "module", "role", "type", "scale")
    columns = (*names, "least seen", "greatest seen", "range chosen", "rule")
    return DataTable(columns=columns, rows=tuple(_tensor_row(record) for record in records))


def _tensor_row(record: TensorRecord) -> tuple[Cell, ...]:
    low, high = record.observed if record.observed is not None else (None, None)
    rule = "; ".join([record.rule, *record.steps])
    scale = max(record.scale) if record.scale else None
    first = record.name, record.module, record.role, kind_of(record)
    return (*first, scale, low, high, record.evidence, rule)

"""The provenance table survives JSON, and damaged JSON is refused."""

import json

import pytest

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import (
    FloatOperator,
    FloatRecord,
    Provenance,
    RecordKind,
    SizeRecord,
    TensorRecord,
    choose_record,
)
from pt2e_quant.core.schemes import Role


def _table() -> Provenance:
    tensor = TensorRecord(
        name="w", role=Role.WEIGHT, scale=[0.5, 0.25], observed=(-1.0, 2.0), read_range=(-0.5, 2.0)
    )
    return Provenance(
        quantizer="q",
        tensors=[tensor],
        floats=[FloatRecord(node="n", op="aten.gelu", module="m", reason="none")],
        notes=["a note"],
    )


def test_provenance_when_written_as_json_then_reads_back_equal():
    assert Provenance.from_json(_table().to_json()) == _table()


@pytest.mark.parametrize(("version", "fix"), [(99, "pip install -U"), (1, "quantize the model")])
def test_provenance_when_it_is_of_another_version_then_says_so(version, fix):
    data = json.loads(_table().to_json()) | {"version": version}
    with pytest.raises(ArtifactError, match=rf"version {version}[\s\S]*{fix}"):
        Provenance.from_json(json.dumps(data))


def _sized(elements: int) -> Provenance:
    table = _table()
    table.sizes = [
        SizeRecord(
            name=f"w{at}", dtype="int8", elements=elements, size_before=4 * elements,
            size_after=elements, qparams=4,
        )
        for at in range(2)
    ]  # fmt: skip
    return table


def test_kept_as_when_brief_then_names_scales_and_total_sizes_stay():
    table = _sized(100)
    table.tensors[0].evidence, table.tensors[0].uses = "won by 2 dB", ["w -> conv"]
    made = table.kept_as(RecordKind.BRIEF)
    assert made.tensors == [TensorRecord(name="w", role=Role.WEIGHT, scale=[0.5, 0.25])]
    assert (made.floats, made.notes, made.float_bytes) == ([], [], 800)
    assert "what observers saw" in made.lacks
    assert table.tensors[0].evidence  # the whole table is as it was


_ISLAND = FloatOperator(
    node="silu",
    operator="aten.silu",
    module="head",
    source="model.py:3  silu(x)",
    bytes_across=None,
    reason="float only",
    remedy="another backend",
)


def test_kept_as_when_none_then_only_the_total_size_stays():
    made = _sized(100).kept_as(RecordKind.NONE)
    assert (made.tensors, made.float_bytes) == ([], 800)
    assert "keeps no record" in made.lacks
    assert Provenance.from_json(made.to_json()) == made


@pytest.mark.parametrize(
    ("brief", "elements", "kind"),
    [(9000, 10, RecordKind.NONE), (4000, 10, RecordKind.BRIEF), (9000, 10**6, RecordKind.FULL)],
)
def test_choose_record_when_nothing_is_asked_then_the_most_within_the_bound(brief, elements, kind):
    sizes = {RecordKind.FULL: 10000, RecordKind.BRIEF: brief, RecordKind.NONE: 100}
    made = choose_record(_sized(elements), None, lambda table: sizes[table.kept])
    assert made.kept is kind


def test_choose_record_when_the_islands_alone_are_too_many_then_the_rest_is_kept():
    table = _sized(10)
    table.islands = [_ISLAND]
    made = choose_record(table, None, lambda one: 1000 if one.islands is None else 10000)
    assert (made.kept, made.islands) == (RecordKind.FULL, None)
    assert table.islands == [_ISLAND]


@pytest.mark.parametrize("islands", [None, [], [_ISLAND]])
def test_provenance_when_written_and_read_then_its_islands_are_the_same(islands):
    made = Provenance(islands=islands)
    assert Provenance.from_json(made.to_json()) == made


def test_choose_record_when_asked_then_size_does_not_matter():
    made = choose_record(_sized(10), RecordKind.FULL, lambda _: 10**9)
    assert made.kept is RecordKind.FULL


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 3, "tensors": [{}]}', "3"])
def test_provenance_when_its_json_is_damaged_then_refused(text):
    with pytest.raises(ArtifactError, match="damaged"):
        Provenance.from_json(text)

"""How much of the provenance a file keeps: what was asked for, said plainly where it is less."""

import functools

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, ConfigError
from pt2e_quant.core.provenance import RecordKind, provenance_of

BACKENDS = [("onnx", ".onnx"), ("xnnpack", ".pte"), ("cpu", ".pt2")]


def converted(name: str):
    """The converted graph of a backend."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 8), nn.Softplus())
    program = torch.export.export(model.eval(), (torch.randn(4, 64),))
    recipe = "int8_dynamic" if name == "cpu" else "int8"
    prepared = pq.prepare_pt2e(program, pq.backends.get(name).quantizer(recipe))
    pq.calibrate(prepared, [(torch.randn(4, 64),)], progress=False)
    return pq.convert_pt2e(prepared, progress=False)


@pytest.fixture(scope="module")
def lowered():
    """Artifacts by backend and record; each is made once."""
    graph_of = functools.cache(converted)

    @functools.cache
    def lower(name: str, record: str | None):
        return pq.backends.get(name).lower(graph_of(name), verify=False, record=record)

    return lower


@pytest.mark.parametrize(("name", "suffix"), BACKENDS)
@pytest.mark.parametrize("record", ["brief", "none"])
def test_lower_when_less_than_all_is_kept_then_the_loaded_file_says_what_lacks(
    lowered, tmp_path, name, suffix, record
):
    artifact = lowered(name, record)
    whole = artifact.report.provenance
    artifact.save(tmp_path / f"m{suffix}")
    loaded = pq.backends.get(name).load(tmp_path / f"m{suffix}")
    table = loaded.report.provenance
    assert table.kept is RecordKind(record)
    assert table.lacks in str(loaded.report).replace("\n", "")
    assert table.lacks in artifact.report.notes
    assert table.float_bytes == whole.float_bytes
    assert [t.name for t in table.tensors] == [t.name for t in whole.tensors] * (record == "brief")
    assert [t.scale for t in table.tensors] == [t.scale for t in whole.tensors][
        : len(table.tensors)
    ]
    x = torch.randn(4, 64)
    assert torch.equal(loaded.run(x), artifact.run(x))


@pytest.mark.parametrize("name", [name for name, _ in BACKENDS])
def test_lower_when_records_differ_then_so_do_sizes(lowered, name):
    files = {r: lowered(name, r) for r in ("full", "brief", "none")}
    assert files["full"].size_bytes > files["brief"].size_bytes > files["none"].size_bytes
    default = lowered(name, None)
    assert default.size_bytes == files["full"].size_bytes  # it is small enough


@pytest.mark.parametrize("name", [name for name, _ in BACKENDS])
def test_lower_when_repeated_then_the_graphs_record_and_the_file_are_the_same(name):
    graph = converted(name)
    before = provenance_of(graph).to_json()
    first, second = (pq.backends.get(name).lower(graph, record="full") for _ in range(2))
    assert provenance_of(graph).to_json() == before
    assert first.size_bytes == second.size_bytes


@pytest.mark.parametrize(("name", "suffix"), BACKENDS[:2])
def test_lower_when_there_is_no_record_then_a_damaged_file_is_refused(
    lowered, tmp_path, name, suffix
):
    lowered(name, "none").save(tmp_path / f"m{suffix}")
    data = bytearray((tmp_path / f"m{suffix}").read_bytes())
    data[len(data) // 2] ^= 0xFF
    (tmp_path / f"m{suffix}").write_bytes(data)
    with pytest.raises(ArtifactError):
        pq.backends.get(name).load(tmp_path / f"m{suffix}")


def test_compare_when_a_file_keeps_a_brief_record_then_a_note_says_so(lowered, tmp_path):
    artifact = lowered("onnx", "brief")
    artifact.save(tmp_path / "m.onnx")
    found = pq.compare(
        artifact.quantized, tmp_path / "m.onnx", [torch.randn(4, 64)], progress=False
    )
    assert any("brief record" in note for note in found.notes)


def test_lower_when_there_is_no_such_record_then_names_are_offered(lowered):
    with pytest.raises(ConfigError, match='no record "breif": did you mean "brief"'):
        lowered("onnx", "breif")

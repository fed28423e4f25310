"""The provenance table survives JSON, and damaged JSON is refused."""

import json

import pytest

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import FloatRecord, Provenance, TensorRecord
from pt2e_quant.core.schemes import Role


def _table() -> Provenance:
    tensor = TensorRecord(name="w", role=Role.WEIGHT, scale=[0.5, 0.25], observed=(-1.0, 2.0))
    return Provenance(
        quantizer="q",
        tensors=[tensor],
        floats=[FloatRecord(node="n", op="aten.gelu", module="m", reason="none")],
        notes=["a note"],
    )


def test_provenance_when_written_as_json_then_reads_back_equal():
    assert Provenance.from_json(_table().to_json()) == _table()


def test_provenance_when_its_version_is_newer_then_says_so():
    data = json.loads(_table().to_json()) | {"version": 99}
    with pytest.raises(ArtifactError, match="version 99"):
        Provenance.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 1, "tensors": [{}]}', "3"])
def test_provenance_when_its_json_is_damaged_then_refused(text):
    with pytest.raises(ArtifactError, match="damaged"):
        Provenance.from_json(text)

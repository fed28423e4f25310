"""The table as JSON: equal when read back, and small where rows repeat one another."""

import json
import math

import pytest

from pt2e_quant.core.errors import ArtifactError
from pt2e_quant.core.provenance import Provenance, TensorRecord
from pt2e_quant.core.schemes import Role

THIRD = 0.3333333432674408  # a float32


def record(**fields) -> TensorRecord:
    return TensorRecord(name="x", role=Role.INPUT, **fields)


@pytest.mark.parametrize(
    "tensor",
    [
        record(),
        record(scale=[THIRD], zero_point=[3], observed=(-THIRD, 0.0)),
        record(scale=[1 / 3, 2.0], zero_point=[0, 0]),
        record(scale=[1e300], observed=(0.0, 0.0)),
        record(observed=(-math.inf, math.inf), read_range=(-3.0, THIRD)),
        record(scale=[0.5] * 9, zero_point=[0] * 9, block=[1, 32], is_dynamic=True, group_size=32),
    ],
)
def test_table_when_read_back_then_every_number_is_equal(tensor):
    other = TensorRecord(name="y", role=Role.WEIGHT, scale=[THIRD] * 3, zero_point=[1, 0, 2])
    table = Provenance(tensors=[tensor, other])
    assert Provenance.from_json(table.to_json()) == table


def test_table_when_the_file_holds_numbers_then_a_word_stands_for_them():
    table = Provenance(tensors=[record(scale=[THIRD, 1 / 7])])
    text = table.to_json(lambda name, field, _: f"{name}.{field}" * (field == "scale"))
    assert "x.scale" in text
    read = Provenance.from_json(text, lambda name, field, word: {"x.scale": [THIRD, 1 / 7]}[word])
    assert read == table
    with pytest.raises(ArtifactError, match="not in the file"):
        Provenance.from_json(text)


def test_table_when_lists_are_defaults_then_rows_do_not_share_them():
    table = Provenance.from_json(Provenance(tensors=[record(), record()]).to_json())
    table.tensors[0].steps.append("gptq")
    assert table.tensors[1].steps == []


@pytest.mark.parametrize("columns", [{"rows": 2, "name": ["a"]}, {"rows": 0, "other": []}])
def test_table_when_its_columns_do_not_fit_then_refused(columns):
    data = json.loads(Provenance().to_json()) | {"tensors": columns}
    with pytest.raises(ArtifactError, match="do not fit"):
        Provenance.from_json(json.dumps(data))


def test_table_when_numbers_are_missing_then_refused():
    data = json.loads(Provenance(tensors=[record(scale=[THIRD])]).to_json()) | {"numbers": ""}
    with pytest.raises(ArtifactError, match="missing"):
        Provenance.from_json(json.dumps(data))

from pt2e_quant.core.provenance import FloatRecord, Provenance, SizeRecord, TensorRecord
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import record_sections


def test_record_sections_when_nothing_is_known_then_there_are_none():
    assert record_sections(Provenance(), "B") == []


def test_record_sections_when_quantized_then_sizes_tensors_and_floats():
    made = Provenance(
        tensors=[
            TensorRecord(
                name="fc.weight",
                role=Role.WEIGHT,
                dtype="int8",
                quant_min=-127,
                quant_max=127,
                scale=[0.5, 0.25],
                observed=(-3.0, 2.0),
                rule="global",
            )
        ],
        floats=[FloatRecord(node="gelu", op="aten.gelu", module="", reason="no int8 gelu")],
        sizes=[
            SizeRecord(name="fc.weight", dtype="int8", elements=8, size_before=32, size_after=8)
        ],
    )
    sizes, tensors, floats = record_sections(made, "B")
    assert sizes.table.rows == (("fc.weight", "int8", 8, 32, 8, 8.0),)
    assert list(sizes.figures) == ["bytes by module"]
    assert tensors.table.rows[0][3:7] == ("int8[-127,127]", 0.5, -3.0, 2.0)
    assert floats.table.rows == ((1, "no int8 gelu", "gelu", "gelu"),)

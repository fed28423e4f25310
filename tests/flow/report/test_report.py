"""The report as text and JSON."""

import json

import pytest

from pt2e_quant.core.provenance import FloatRecord, Provenance, TensorRecord
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report.report import FloatRegion, Report
from pt2e_quant.flow.report.rows import float_lines


def _report() -> Report:
    weight = TensorRecord(
        name="fc.weight",
        role=Role.WEIGHT,
        dtype="int8",
        quant_min=-127,
        quant_max=127,
        axis=0,
        scale=[0.5, 0.25],
        zero_point=[0, 0],
        observed=(-1.0, 2.0),
        rule="global -> int8",
        size_before=4000,
        size_after=1016,
    )
    gelus = [
        FloatRecord(node=f"gelu_{i}", op="aten.gelu", module="", reason="no int8 gelu")
        for i in range(6)
    ]
    return Report(
        backend="xnnpack",
        provenance=Provenance(tensors=[weight], floats=gelus),
        integer_ops={"conv": 2, "linear": 1},
        float_regions=[
            FloatRegion(node="dq_3", what="1 dequantize", reason="feeds gelu", cost="12544")
        ],
        notes=["link the quantized kernels"],
        sqnr_canonical_db=44.06,
        size_bytes=1200,
        float_size_bytes=4000,
    )


def test_report_when_printed_then_says_all_of_it():
    text = str(_report())
    for part in (
        "3: 2 conv, 1 linear",
        "fc.weight",
        "int8[-127,127] axis 0",
        "4,000 -> 1,016",
        "global -> int8",
        "no int8 gelu",
        "gelu_0, gelu_1, gelu_2, gelu_3, … (2 more)",
        "feeds gelu",
        "0.30x the float constants",
        "44.1 dB",
        "note: link the quantized kernels",
    ):
        assert part in text.replace("\n", " ") or part in " ".join(
            text.replace("│", " ").split()
        ), part


def test_report_when_written_as_json_then_it_parses():
    data = json.loads(_report().to_json())
    assert data["integer_ops"] == {"conv": 2, "linear": 1}
    assert data["provenance"]["tensors"][0]["role"] == "weight"


def test_to_json_when_nothing_is_lost_then_infinity_is_null():
    report = _report()
    report.sqnr_float_db = float("inf")
    data = json.loads(report.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert data["sqnr_float_db"] is None


def _weights(layers: int) -> list[TensorRecord]:
    return [
        TensorRecord(
            name=f"layers.{n}.fc{k}.weight",
            role=Role.WEIGHT,
            dtype="int4",
            quant_min=-8,
            quant_max=7,
            group_size=32,
            observed=(-1.0 - n, 2.0 + n),
            rule="global -> w4_g32",
            size_before=400,
            size_after=60 + k,
        )
        for n in range(layers)
        for k in (1, 2)
    ]


def test_text_when_layers_repeat_then_one_line_for_all_of_a_kind():
    text = " ".join(str(Report(backend="B", provenance=Provenance(tensors=_weights(12)))).split())
    assert "│ layers.*.fc1.weight │ 12 │ weight │ int4[-8,7] groups of 32 │ -12…13 │" in text
    assert "4,800 -> 732" in text
    assert "4,800 -> 744" in text
    assert "layers.3" not in text
    assert "scale" not in text  # groups' scales are in no record: an empty column is left out


def test_text_when_a_scheme_leaves_inputs_float_then_one_line_for_all_operators():
    reason = 'B {}: scheme "w4" leaves its input "{}" float'
    floats = [
        FloatRecord(node=f"{op}_{i}", op=f"aten.{op}", module="", reason=reason.format(op, at))
        for op, at in (("mul", "x"), ("cat", "xs"), ("neg", "x"))
        for i in range(3)
    ]
    floats += [
        FloatRecord(node=op, op=f"aten.{op}", module="", reason=f"B has no int8 {op} here")
        for op in ("cos", "sin")
    ]
    rows = float_lines(floats, "B")
    assert [(r.reason, r.count, r.operators) for r in rows] == [
        ('scheme "w4" leaves its input float', 9, "3 mul, 3 cat, 3 neg"),
        ("B has no int8 form of it", 2, "cos, sin"),
    ]
    assert rows[0].nodes == "mul_0, mul_1, mul_2, cat_0, … (5 more)"


def test_text_when_tensors_are_quantized_at_run_time_then_it_says_so():
    for is_dynamic in (True, False):  # per token, records say no more than the dtype
        record = TensorRecord(name="x", role=Role.INPUT, dtype="int8", is_dynamic=is_dynamic)
        text = str(Report(backend="B", provenance=Provenance(tensors=[record])))
        assert "int8 at run time" in text
        assert "[0,0]" not in text

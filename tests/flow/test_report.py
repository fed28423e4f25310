"""The report as text and JSON."""

import json

from pt2e_quant.core.provenance import FloatRecord, Provenance, TensorRecord
from pt2e_quant.core.schemes import Role
from pt2e_quant.flow.report import Island, Report


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
        islands=[Island(node="dq_3", what="1 dequantize", reason="feeds gelu", cost="12544")],
        notes=["link the quantized kernels"],
        sqnr_canonical_db=44.06,
        size_bytes=1200,
        float_size_bytes=4000,
    )


def test_text_says_all_of_it():
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


def test_json_is_json():
    data = json.loads(_report().to_json())
    assert data["integer_ops"] == {"conv": 2, "linear": 1}
    assert data["provenance"]["tensors"][0]["role"] == "weight"

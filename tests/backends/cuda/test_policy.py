"""What tables of measured ratios decide: made-up ones, as `benchmarks.gpu` writes them."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu_tune import write_measured
from pt2e_quant.backends.cuda.lower import describe, lower_graph
from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.backends.cuda.table import REGISTRY
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.report.report import Report
from pt2e_quant.kernels import measured
from pt2e_quant.kernels.measured import Variant, measured_class, measured_of
from tests.backends.cuda.test_fp8 import quantized
from tests.backends.cuda.test_lower import canonical
from tests.kernels.lowering import calls_of

DEVICE = "made_up"
HERE = Measures(device=DEVICE, allow_unmeasured=False, capability=90)
FAST = {"decode": 2.0, "decode_narrow": 2.0, "narrow": 2.0, "row": 2.0, "small": 2.0, "": 2.0}


@pytest.fixture
def table(monkeypatch, tmp_path):
    """Writes ratios of a unit for the device."""
    monkeypatch.setattr(measured, "files", lambda package: tmp_path)
    measured.read_ratios.cache_clear()

    def write(op, ratio=2.0, variant=Variant.PLAIN):
        rows = {measured_class(name, variant): ratio for name in FAST}
        write_measured(op, DEVICE, rows, folder=tmp_path)
        measured.read_ratios.cache_clear()

    yield write
    measured.read_ratios.cache_clear()


def test_measured_ratios_when_a_unit_has_variants_then_their_ratios_are_apart(table):
    table("quantize", 2.0)
    table("quantize", 0.5, Variant.E4M3)
    assert set(measured_of("quantize", DEVICE).values()) == {2.0}
    assert measured_of("quantize", DEVICE, Variant.E4M3)["small"] == 0.5
    assert measured_of("quantize", DEVICE, Variant.PIXELS) == {}
    assert HERE.allows("quantize")
    assert not HERE.allows("quantize", Variant.E4M3)
    assert not HERE.allows("quantize", Variant.PIXELS)


@pytest.mark.parametrize("slow", ["norm_quantize", "quantize_per_token"])
def test_lowering_when_a_unit_is_slow_in_8_bit_floats_then_it_is_left_out_there_alone(table, slow):
    for op in ("fp8_linear", "int8_linear", "norm_quantize", "quantize_per_token", "quantize"):
        table(op)
        table(op, 0.5 if op == slow else 2.0, Variant.E4M3)
    gm, x = quantized("fp8_dynamic")
    made = lower_graph(gm, REGISTRY, HERE)
    assert not [name for name in calls_of(made) if name.startswith(slow)]
    assert calls_of(made).count("fp8_linear") == 5
    assert torch.allclose(made(x), gm(x), atol=1e-2)
    integers = calls_of(lower_graph(quantized("int8_dynamic")[0], REGISTRY, HERE))
    assert integers.count("norm_quantize_per_token") == 2
    assert integers.count("quantize_per_token") == 2


def test_lowering_when_a_norm_writes_static_e4m3_then_its_own_ratio_decides(table):
    for op in ("fp8_linear", "norm_quantize", "quantize"):
        table(op)
    table("quantize", 2.0, Variant.E4M3)
    gm, _ = quantized("fp8")
    assert "norm_quantize" not in calls_of(lower_graph(gm, REGISTRY, HERE))
    table("norm_quantize", 2.0, Variant.E4M3)
    assert calls_of(lower_graph(gm, REGISTRY, HERE)).count("norm_quantize") == 2


def test_lowering_when_a_product_alone_was_measured_then_it_takes_torchs_own_qparams(table):
    """They are float64 and int64, which no kernel takes, where only the product was measured."""
    table("int8_linear")
    gm, _ = canonical("int8_dynamic")
    made = lower_graph(gm, REGISTRY, HERE)
    assert calls_of(made) == ["int8_linear"] * 4
    found = [n for n in made.graph.nodes if "int8_linear" in str(n.target)]
    for node in found:
        scale, zero_point = (n.meta["val"].dtype for n in node.args[1:3])
        assert (scale, zero_point) == (torch.float32, torch.int32)
    x = torch.randn(5, 24)
    assert torch.allclose(made(x), gm(x), atol=1e-5)


def test_report_when_kernels_were_not_measured_then_names_them_by_what_they_write(table):
    for op in ("fp8_linear", "quantize", "norm_quantize"):
        table(op)
    gm, _ = quantized("fp8")
    allowing = replace(HERE, allow_unmeasured=True)
    report = Report(backend="CUDA", provenance=provenance_of(gm), size_bytes=0)
    describe(report, lower_graph(gm, REGISTRY, allowing), allowing)
    assert report.notes == ["not measured on made_up: norm_quantize to e4m3, quantize to e4m3"]

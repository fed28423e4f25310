"""Whole fused modules with every kernel in Triton's interpreter, held to the definitions."""

import pytest
import torch

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.backends.cuda.policy import Measures
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.small_models import MODELS

ALLOWING = BACKEND.allowing_unmeasured()
# Behind exp and erf a value may fall to the next step, which later layers make more of.
LEAST_DB = 45.0


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("resnet", "int8"),
        ("bottleneck", "int8"),
        ("mobilenet", "int8"),
        ("vit", "int8"),
        ("bert", "int8"),
        ("llama", "int8_dynamic"),
        ("llama", "w4_g32"),
        ("llama", "a8w4_g32"),
    ],
)
def test_models_when_kernels_run_then_compute_what_the_definitions_do(name, recipe, monkeypatch):
    make, batches = MODELS[name]
    data = batches()
    monkeypatch.setenv("TRITON_INTERPRET", "0")  # calibration and checks by the definitions
    prepared = prepare_pt2e(torch.export.export(make(), data[0]), BACKEND.quantizer(recipe))
    calibrate(prepared, data, progress=False)
    artifact = ALLOWING.lower(convert_pt2e(prepared), verify=False)
    wanted = artifact.run(*data[0])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    made = artifact.run(*data[0])
    assert sqnr_db([wanted], [made]) > LEAST_DB


def test_int8_linear_when_it_alone_was_measured_then_runs_behind_torchs_quantize(monkeypatch):
    """Behind torch's own quantize, whose scales are float64: a launcher refuses those."""
    torch.manual_seed(0)
    x = torch.randn(3, 40)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    exported = torch.export.export(torch.nn.Linear(40, 24).eval(), (x,))
    gm = convert_pt2e(prepare_pt2e(exported, BACKEND.quantizer("int8_dynamic")))
    monkeypatch.setattr(Measures, "ratio", lambda *_: 2.0)
    artifact = BACKEND.lower(gm, verify=False)
    assert artifact.report.integer_ops == {"int8_linear": 1}
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert torch.allclose(artifact.run(x), gm(x), atol=1e-5)

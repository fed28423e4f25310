"""Whole models on the CPU backend: every convolution and linear fused, near the canonical graph."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.parameters import named_subset
from tests.small_models import MODELS

pytestmark = pytest.mark.usefixtures("unmeasured")

CPU = get("cpu")
# A sum that differs in its last bit moves a value by one step where it lies on a tie, and deep
# graphs make more of it: the artifact is held to the graph far closer than the graph to float.
LEAST_DB = 40.0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recipe", named_subset(["int8", "int8_reduced"], "int8"))
def test_model_when_lowered_then_all_fused_and_near_the_graph(name, recipe):
    make, batches = MODELS[name]
    model, data = make(), batches()
    gemms = sum(isinstance(m, (nn.Conv2d, nn.Linear)) for m in model.modules())
    batch = torch.export.Dim("batch", max=64)
    is_fixed = name in ("bert", "llama")  # one text each
    shapes = None if is_fixed else ({0: batch},)
    ep = torch.export.export(model, data[0], dynamic_shapes=shapes)
    prepared = prepare_pt2e(ep, CPU.quantizer(recipe))
    calibrate(prepared, data, progress=False)
    gm = convert_pt2e(prepared)
    artifact = CPU.lower(gm)
    report = artifact.report
    fused = sum(n for op, n in report.integer_ops.items() if op.startswith("onednn."))
    assert fused == gemms
    assert not report.float_regions
    assert report.sqnr_canonical_db >= LEAST_DB
    if not is_fixed:
        one = data[0][0][:1]
        with torch.no_grad():
            expected, found = gm(one), artifact.run(one)
        assert found.shape == expected.shape

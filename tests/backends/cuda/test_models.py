"""Whole models on the CUDA backend by the kernels' definitions: fused, near the canonical graph."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from tests.parameters import named_subset
from tests.small_models import MODELS

ALLOWING = BACKEND.allowing_unmeasured()
# A sum that differs in its last bit moves a value by one step where it lies on a tie, and deep
# graphs make more of it: the artifact is held to the graph far closer than the graph to float.
LEAST_DB = 40.0
_GEMMS = (nn.Conv2d, nn.Linear)
_FUSED = ("int8_conv2d", "int8_linear", "int4_linear", "a8w4_linear")


def lowered(name, recipe):
    make, batches = MODELS[name]
    model, data = make(), batches()
    prepared = prepare_pt2e(torch.export.export(model, data[0]), BACKEND.quantizer(recipe))
    calibrate(prepared, data, progress=False)
    return model, data, convert_pt2e(prepared)


@pytest.mark.parametrize("name", MODELS)
def test_lower_when_a_model_is_static_int8_then_it_is_fused_and_near_its_graph(name):
    model, _, gm = lowered(name, "int8")
    report = ALLOWING.lower(gm).report
    gemms = sum(isinstance(m, _GEMMS) for m in model.modules())
    assert sum(report.integer_ops.get(op, 0) for op in _FUSED) == gemms
    assert not [i for i in report.float_regions if i.what == "weight dequantize"]
    assert report.sqnr_canonical_db >= LEAST_DB


NEEDING_NO_DATA = [
    (name, recipe)
    for name in ("vit", "bert", "llama")
    for recipe in ("int8_dynamic", "w4_g32", "a8w4_g32")
]


@pytest.mark.parametrize(
    ("name", "recipe"),
    named_subset(
        NEEDING_NO_DATA, ("vit", "w4_g32"), ("bert", "int8_dynamic"), ("llama", "a8w4_g32")
    ),
)
def test_lower_when_the_recipe_needs_no_data_then_the_model_is_fused_and_near_its_graph(
    name, recipe
):
    model, _, gm = lowered(name, recipe)
    report = ALLOWING.lower(gm).report
    linears = sum(isinstance(m, nn.Linear) for m in model.modules())
    assert sum(report.integer_ops.get(op, 0) for op in _FUSED) == linears
    assert report.sqnr_canonical_db >= LEAST_DB

"""Mixtures of experts on both runtimes: sizes, accuracy, and what stays float."""

import pytest
import torch
from torch.export import Dim

import pt2e_quant as pq
from tests.mixture_of_experts import Mixture

SIZES = {"int8": 0.3, "int8_dynamic": 0.32, "w8": 0.3, "a8w4_g32": 0.2}
"""What is left of the float weights, with the metadata of a file."""
SQNR_DB = {"a8w4_g32": 20.0}


def rows(count, seed):
    return torch.randn(1, count, 128, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recipe", SIZES)
@pytest.mark.parametrize("backend", ["xnnpack", "onnx"])
@pytest.mark.parametrize("form", ["grouped", "gathered", "turned"])
def test_experts_when_quantized_then_small_and_as_accurate_at_any_number_of_tokens(
    form, backend, recipe, tmp_path
):
    if form == "grouped":
        pytest.importorskip("transformers")
    model = Mixture(form, dim=128, width=160).eval()
    batches = [(rows(12, seed),) for seed in range(4)]
    artifact = pq.quantize(
        model,
        args=batches[0],
        dynamic_shapes={"x": {1: Dim("tokens", max=64)}},
        calibration_data=batches,
        backend=pq.backends.get(backend).allowing_slower(),
        recipe=recipe,
        effort="fast",
    )
    path = tmp_path / "artifact"
    artifact.save(path)
    floats = sum(p.nbytes for p in model.parameters())
    assert path.stat().st_size < SIZES[recipe] * floats
    again = pq.backends.get(backend).load(path)
    for count in (12, 2, 40, 1):
        x = rows(count, seed=10 + count)
        expected = model(x)
        for run in (artifact.run, again.run):
            assert pq.sqnr_db(expected, run(x)) > SQNR_DB.get(recipe, 35.0)


def test_router_when_quantized_then_it_stays_float_and_says_why():
    model, batches = Mixture("gathered", dim=128, width=160).eval(), [(rows(12, 0),)]
    for backend in ("xnnpack", "onnx"):
        artifact = pq.quantize(
            model, args=batches[0], calibration_data=batches, backend=backend, recipe="w8"
        )
        (record,) = [r for r in artifact.report.provenance.floats if r.node == "linear"]
        assert "needs: no choice of experts" in record.reason


def test_router_when_the_preference_is_overruled_then_it_is_quantized():
    model, x = Mixture("gathered", dim=128, width=160).eval(), rows(12, 0)
    program = torch.export.export(model, (x,))
    quantizer = pq.backends.get("onnx").quantizer("w8").allowing("routers")
    quantized = pq.convert_pt2e(pq.prepare_pt2e(program, quantizer))
    assert "linear" not in [record.node for record in pq.provenance_of(quantized).floats]

"""The benchmark that plants faults, and the share that `compare` names first."""

import copy
import random

import pytest
import torch

import pt2e_quant as pq
from benchmarks import planted_faults
from benchmarks.planted_faults import FAULTS, GOAL, SMALL, plant, quantized, quantized_for, trial

pytestmark = pytest.mark.usefixtures("integers_everywhere")


@pytest.fixture(scope="module")
def models():
    return [quantized(name) for name in SMALL]


@pytest.mark.parametrize("fault", FAULTS)
def test_plant_when_a_fault_is_drawn_then_a_copy_of_the_graph_is_changed(models, fault):
    model = models[1]
    before = copy.deepcopy(dict(model.gm.named_buffers()))
    planted = plant(model, fault, random.Random(3))
    images = model.batches[0]
    assert not torch.equal(planted.gm(*images), model.gm(*images))
    assert all(torch.equal(v, before[n]) for n, v in model.gm.named_buffers())


def test_compare_when_faults_are_planted_then_their_nodes_are_named_first(models):
    rows = [trial(models[seed % 3], seed, "graph") for seed in range(30)]
    assert {row["fault"] for row in rows} == {*FAULTS}
    assert sum(row["is_first"] for row in rows) >= GOAL * len(rows), rows


@pytest.mark.parametrize(("form", "runtime"), [("onnx", "onnxruntime"), ("xnnpack", "executorch")])
def test_compare_when_a_lowered_model_has_a_planted_fault_then_its_node_is_named_first(
    models, form, runtime
):
    pytest.importorskip(runtime)
    assert trial(models[0], 0, form)["is_first"]


@pytest.mark.parametrize("fault", ["wrong zero point", "transposed scale"])
def test_plant_when_a_backend_counts_from_zero_and_quantizes_biases_then_a_fault_is_one(fault):
    pytest.importorskip("onnxruntime")
    model = quantized("mobilenet", "onnx")
    planted = [plant(model, fault, random.Random(seed)) for seed in range(4)]
    for one in planted:
        row = pq.compare(model.program, one.gm, model.batches[:1], progress=False).worst(1)[0]
        assert row.node == one.node


@pytest.mark.slow
@pytest.mark.parametrize("form", ["graph", "onnx", "xnnpack"])
def test_compare_when_200_faults_are_planted_then_95_percent_are_named_first(form):
    models = quantized_for(form, SMALL)
    rows = [trial(models[seed % 3], seed, form) for seed in range(200)]
    assert planted_faults.GOAL == 0.95
    assert sum(row["is_first"] for row in rows) >= GOAL * len(rows)

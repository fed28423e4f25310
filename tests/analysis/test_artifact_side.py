"""Lowered programs as sides of a comparison."""

import math

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ConfigError
from tests.analysis.test_compare import scaled_range

BACKENDS = {"onnx": "onnxruntime", "xnnpack": "executorch", "cpu": "torch"}


@pytest.fixture(scope="module")
def wrong(made):
    """The q/dq graph with one bad range."""
    return scaled_range(made[3], "conv2d_2", 16)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compare_when_a_program_has_a_bad_range_then_its_node_is_the_worst(made, wrong, backend):
    pytest.importorskip(BACKENDS[backend])
    _, program, _, _, batches = made
    artifact = pq.backends.get(backend).lower(wrong, verify=False)
    found = pq.compare(program, artifact, batches, progress=False)
    assert found.worst(1)[0].node == "conv2d_2"
    assert {"x", "conv2d", "silu", "relu6_", "add_", "layer_norm", "linear"} <= {
        row.node for row in found.activations
    }
    assert len(found.weights) == 4
    of_graph = pq.compare(program, wrong, batches, progress=False)
    for row in found.activations:
        assert row.sqnr_db == pytest.approx(of_graph.node(row.node).sqnr_db, abs=0.2)


def test_compare_when_a_pass_adds_a_convolution_then_values_keep_their_names():
    pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 8, 2, 2))
    model += nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    images = torch.randn(2, 3, 8, 8)
    artifact = pq.quantize(
        *(model.eval(), (images,)),
        calibration_data=[images],
        backend=pq.backends.get("onnx").allowing_slower(),
        effort="fast",
        progress=False,
    )
    found = pq.compare(model, artifact, [images], progress=False)
    of_graph = pq.compare(model, artifact.quantized, [images], progress=False)
    for row in found.activations:
        assert row.sqnr_db == pytest.approx(of_graph.node(row.node).sqnr_db, abs=0.5)
    assert not any("other shapes" in note for note in found.notes)
    timed = {row.node: row.module for row in artifact.profile(images).nodes}
    assert (timed["conv2d_1"], timed["conv2d_2"]) == ("3", "5")


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_compare_when_a_program_is_held_against_its_graph_then_steps_are_equal(made, backend):
    pytest.importorskip(BACKENDS[backend])
    _, _, _, quantized, batches = made
    artifact = pq.backends.get(backend).lower(quantized, verify=False)
    found = pq.compare(quantized, artifact, batches, progress=False)
    assert len(found.activations) >= 7
    steps = [row.max_steps for row in found.activations if row.max_steps is not None]
    assert max(steps) < 0.01
    assert all(row.own_sqnr_db is None for row in found.activations)


def test_compare_when_a_side_is_the_integer_reference_then_its_values_are_read(made, wrong):
    _, program, _, _, batches = made
    reference = pq.integer_reference(wrong)
    found = pq.compare(program, reference, batches, progress=False)
    assert found.worst(1)[0].node == "conv2d_2"
    against = pq.compare(wrong, reference, batches, progress=False)
    steps = [row.max_steps for row in against.activations if row.max_steps is not None]
    assert len(steps) >= 7
    assert max(steps) <= 1.001
    assert math.isfinite(found.sqnr_db)


def test_compare_when_an_onnx_file_is_given_then_its_own_values_are_read(made, wrong, tmp_path):
    pytest.importorskip("onnxruntime")
    _, program, _, _, batches = made
    path = tmp_path / "model.onnx"
    pq.backends.get("onnx").lower(wrong, verify=False).save(path)
    found = pq.compare(program, path, batches, progress=False)
    assert {"conv2d", "relu6_", "conv2d_2"} <= {row.node for row in found.activations}
    whole = pq.compare(program, path, batches, quantized=wrong, progress=False)
    assert found.node("conv2d_2").sqnr_db == whole.node("conv2d_2").sqnr_db < 26
    assert whole.worst(1)[0].node == "conv2d_2"


def test_compare_when_a_file_is_held_against_a_program_then_named_as_that_program(
    made, wrong, tmp_path
):
    pytest.importorskip("onnxruntime")
    batches = made[-1]
    path = tmp_path / "model.onnx"
    artifact = pq.backends.get("onnx").lower(wrong, verify=False)
    artifact.save(path)
    for reference in (artifact, pq.integer_reference(wrong)):
        found = pq.compare(reference, path, batches, progress=False)
        assert {"conv2d", "relu6_", "conv2d_2"} <= {row.node for row in found.activations}
        assert not found.notes
        assert found.sqnr_db > 60


def test_compare_when_a_file_gives_no_values_then_results_alone_and_a_note_asks_for_the_graph(
    made, wrong, tmp_path
):
    pytest.importorskip("executorch")
    _, program, _, _, batches = made
    path = tmp_path / "model.pte"
    pq.backends.get("xnnpack").lower(wrong, verify=False).save(path)
    alone = pq.compare(program, path, batches, progress=False)
    assert not alone.nodes
    assert "quantized=graph" in str(alone)
    found = pq.compare(program, path, batches, quantized=wrong, progress=False)
    assert alone.sqnr_db == found.sqnr_db < 40
    assert found.worst(1)[0].node == "conv2d_2"
    with pytest.raises(ConfigError, match="no backend writes"):
        pq.compare(program, tmp_path / "model.bin", batches, progress=False)

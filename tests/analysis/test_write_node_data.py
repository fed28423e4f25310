import json
import math

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import ArtifactError, ConfigError, UnsupportedError


def test_write_node_data_when_decibels_then_low_ones_are_red(tmp_path):
    path = tmp_path / "nodes.json"
    pq.write_node_data(path, {"conv2d": 12.0, "relu": math.inf, "linear": 40.0}, name="own SQNR")
    found = json.loads(path.read_text())
    assert found["name"] == "own SQNR"
    assert found["results"] == {"conv2d": {"value": 12.0}, "linear": {"value": 40.0}}
    assert [item["stop"] for item in found["gradient"]] == [0.0, 0.5, 1.0]
    pq.write_node_data(path, {"a": 1.0}, name="us", low_is_bad=False)
    turned = json.loads(path.read_text())["gradient"]
    assert turned[0]["bgColor"] == found["gradient"][2]["bgColor"]


def test_write_node_data_when_there_is_nothing_or_nowhere_then_says_so(tmp_path):
    with pytest.raises(ConfigError, match="no figure"):
        pq.write_node_data(tmp_path / "a.json", {"x": math.nan}, name="dB")
    with pytest.raises(ArtifactError, match="cannot write"):
        pq.write_node_data(tmp_path / "no" / "a.json", {"x": 1.0}, name="dB")


def test_write_node_data_when_of_an_onnx_then_by_the_names_of_its_nodes(tmp_path):
    onnx = pytest.importorskip("onnx")
    x = torch.randn(2, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)).eval()
    made = pq.quantize(model, (x,), calibration_data=[x], backend="onnx", progress=False)
    losses = {loss.name: loss.sqnr_db for loss in pq.tensor_values(made.quantized, [x]).losses}
    pq.write_node_data(tmp_path / "a.json", losses, name="dB", artifact=made)
    made.save(tmp_path / "a.onnx")
    found = {node.name for node in onnx.load(tmp_path / "a.onnx").graph.node}
    ids = set(json.loads((tmp_path / "a.json").read_text())["results"])
    assert ids
    assert ids <= found | {"[value] input"}
    assert not ids & losses.keys()


def test_write_node_data_when_of_a_pt2_then_every_node_compared_has_its_name(made, tmp_path):
    _, program, _, quantized, batches = made
    rows = pq.compare(program, quantized, batches, progress=False).activations
    torch.export.save(program, tmp_path / "a.pt2")
    nodes = {node.name for node in torch.export.load(tmp_path / "a.pt2").graph_module.graph.nodes}
    assert {row.node for row in rows} <= nodes


def test_write_node_data_when_the_file_has_no_names_then_refused(made, tmp_path):
    artifact = pq.backends.get("xnnpack").lower(made[3], verify=False)
    with pytest.raises(UnsupportedError, match="no names"):
        pq.write_node_data(tmp_path / "a.json", {"conv2d": 1.0}, name="dB", artifact=artifact)

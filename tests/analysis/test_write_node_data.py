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


def test_write_node_data_when_of_a_pte_then_by_the_places_of_its_operators(made, tmp_path):
    _, _, _, quantized, batches = made
    artifact = pq.backends.get("xnnpack").lower(quantized, verify=False)
    values = pq.tensor_values(quantized, batches).losses
    losses = {row.name: row.sqnr_db for row in values}
    path = tmp_path / "a.json"
    own = {r.node: 1.0 for r in pq.compare(made[1], quantized, batches, progress=False).activations}
    assert own.keys() <= {*artifact.node_ids("a.pte")}
    pq.write_node_data(path, losses, name="dB", artifact=artifact, file=tmp_path / "a.pte")
    found = json.loads(path.read_text())
    contents = artifact.contents()
    operators = {
        (f"a.pte::forward_{chain}_{at}", str(number)): operator.name
        for (chain, at), delegate in zip(contents.places, contents.delegates, strict=True)
        for number, operator in enumerate(delegate)
    }
    figures = {(g, n): item["value"] for g, d in found.items() for n, item in d["results"].items()}
    assert figures.keys() <= {*operators, ("forward", "forward_0_1")}
    products = {n: at for at, n in operators.items() if n in ("Conv2d", "FullyConnected")}
    assert figures[products["FullyConnected"]] == pytest.approx(losses["linear"])
    # The activation is fused into the convolution in front of it.
    fused = [at for at, name in operators.items() if "Conv2d" in name]
    assert len(fused) == 3
    assert figures[fused[1]] == pytest.approx(losses["relu6"])


def test_write_node_data_when_a_kernel_is_called_then_it_is_an_instruction(tmp_path):
    x = torch.randn(2, 4)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.second(torch.atan(self.first(x)))

    how = {"backend": "xnnpack", "recipe": "int8_minmax"}  # `int8` has no range for "x" here
    made = pq.quantize(Model().eval(), (x,), calibration_data=[x], **how)
    path = tmp_path / "a.json"
    values = {"x": 0.5, "linear": 1.0, "atan": 2.0, "linear_1": 3.0}
    pq.write_node_data(path, values, name="dB", artifact=made, file="b.pte")
    found = {
        (graph, node): item["value"]
        for graph, data in json.loads(path.read_text()).items()
        for node, item in data["results"].items()
    }
    kernels = [key for key in found if key[0] == "forward"]
    assert [found[key] for key in kernels] == [2.0]
    assert sorted(found.values()) == [0.5, 1.0, 2.0, 3.0]


def test_write_node_data_when_the_file_is_not_known_then_refused(made, tmp_path):
    artifact = pq.backends.get("xnnpack").lower(made[3], verify=False)
    path, given = tmp_path / "a.json", {"values": {"conv2d": 1.0}, "name": "dB"}
    with pytest.raises(ConfigError, match="by its file"):
        pq.write_node_data(path, **given, artifact=artifact)
    artifact.save(tmp_path / "a.pte")
    loaded = pq.backends.get("xnnpack").load(tmp_path / "a.pte")
    with pytest.raises(UnsupportedError, match="was loaded"):
        pq.write_node_data(path, **given, artifact=loaded, file="a.pte")


def test_write_node_data_when_of_a_module_then_says_that_there_is_no_such_file(made, tmp_path):
    artifact = pq.backends.get("cpu").lower(made[3], verify=False)
    with pytest.raises(UnsupportedError, match="does not read files"):
        pq.write_node_data(tmp_path / "a.json", {"conv2d": 1.0}, name="dB", artifact=artifact)

import pytest
import torch
from torch import nn

from pt2e_quant.backends.profile import WorkKind
from pt2e_quant.one_call import quantize

pytestmark = pytest.mark.usefixtures("integers_everywhere")


def test_profile_when_run_by_onnx_runtime_then_operators_have_the_names_of_the_graph():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Hardswish(), nn.Flatten())
    model.append(nn.Linear(8 * 36, 4))
    x = torch.randn(2, 3, 8, 8)
    artifact = quantize(model, (x,), calibration_data=[x], backend="onnx", progress=False)
    found = artifact.profile(x)
    by_node = {node.node: node for node in found.nodes}
    assert by_node["conv2d"].kernel == "QLinearConv"
    assert by_node["conv2d"].kind is WorkKind.INTEGER
    assert by_node["conv2d"].module == "0"
    assert by_node["linear"].module == "4"
    kinds = {node.kernel: node.kind for node in found.nodes if node.node == "hardswish"}
    assert kinds["Mul"] is WorkKind.FLOAT
    assert {node.kind for node in found.nodes if "Quantize" in node.kernel} == {WorkKind.CONVERT}
    assert {node.kind for node in found.nodes if node.kernel == "Transpose"} <= {WorkKind.MOVE}
    assert all(node.cost.bytes > 0 for node in found.nodes)
    assert found.runtime == "ONNX Runtime"
    assert found.call_us > 0
    graph = {node.name for node in artifact.quantized.graph.nodes}
    assert sum(found.share(node) for node in found.nodes if node.node in graph) > 0.5


def test_profile_when_the_model_keeps_state_then_it_is_given():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.register_buffer("seen", torch.zeros(1, 8))

        def forward(self, x):
            self.seen.add_(x.mean(0, keepdim=True))
            return self.fc(x) + self.seen

    torch.manual_seed(0)
    x = torch.randn(4, 8)
    artifact = quantize(Counting(), (x,), calibration_data=[x], backend="onnx", progress=False)
    first = artifact.run(x)
    artifact.reset()
    assert "linear" in {node.node for node in artifact.profile(x).nodes}
    assert torch.equal(artifact.run(x), first)


def test_profile_when_scales_are_chosen_at_run_time_then_that_is_conversion():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8)
    artifact = quantize(model, (x,), backend="onnx", recipe="int8_dynamic", progress=False)
    found = artifact.profile(x)
    assert {n.kind for n in found.nodes if n.kernel == "ReduceMin"} == {WorkKind.CONVERT}
    products = [n for n in found.nodes if n.kernel == "MatMulIntegerToFloat"]
    assert [n.node for n in products] == ["linear", "linear_1"]
    assert [n.module for n in products] == ["0", "2"]

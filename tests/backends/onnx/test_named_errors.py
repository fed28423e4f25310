"""What ONNX Runtime does not load is refused with the operator and a fix."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import onnx

import pt2e_quant as pq
from pt2e_quant.backends.onnx import lower
from pt2e_quant.core.errors import ArtifactError, UnsupportedError


class Waves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(torch.cos(self.linear(x)).abs())


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> list[Tensor]:
        return list(self.linear(x)[:-1].unbind(0))


def quantized(model, *, strict=True):
    torch.manual_seed(0)
    batches = [(torch.randn(1, 8),) for _ in range(2)]
    return pq.quantize(
        model.eval(),
        batches[0],
        calibration_data=batches,
        backend="onnx",
        strict=strict,
        progress=False,
    )


def test_lower_when_the_runtime_does_not_load_an_operator_then_it_is_named(monkeypatch):
    optimize = lower.optimize

    def optimize_without_cosine(model: bytes):
        if any(node.op_type == "Cos" for node in onnx.load_from_string(model).graph.node):
            raise ArtifactError("ONNX Runtime does not load this model: no Cos")
        return optimize(model)

    monkeypatch.setattr(lower, "optimize", optimize_without_cosine)
    with pytest.raises(ArtifactError, match="no Cos") as found:
        quantized(Waves())
    assert found.value.node_name == "cos"
    assert "write it with other operators" in found.value.fix


def test_lower_when_only_the_whole_is_not_loaded_then_its_output_is_named(monkeypatch):
    calls = []

    def optimize_parts(model: bytes):
        calls.append(model)
        if len(calls) == 1:
            raise ArtifactError("ONNX Runtime does not load this model: no whole")
        return optimize(model)

    optimize = lower.optimize
    monkeypatch.setattr(lower, "optimize", optimize_parts)
    with pytest.raises(ArtifactError, match="no whole") as found:
        quantized(Waves())
    assert found.value.node_name == "output"


@pytest.mark.filterwarnings("ignore:no tensor of this graph")
def test_lower_when_the_model_gives_no_tensor_then_refused_with_a_fix():
    with pytest.raises(UnsupportedError, match="gives no tensor") as found:
        quantized(Nothing(), strict=False)
    assert (found.value.node_name, found.value.fix) == ("output", "return a tensor")

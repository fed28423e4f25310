import pytest
import torch
from torch import nn

pytest.importorskip("executorch", reason="needs the extra xnnpack")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("torchao", reason="needs torchao")

from benchmarks import peers
from benchmarks.count_ops import count_ops
from benchmarks.measure import sqnr_db

# a peer on one conv-relu and one linear: 8-bit rounding of a handful of tensors
MIN_INT8_DB = 25.0
MIN_FLOAT_DB = 100.0


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    ).eval()
    batches = [(torch.randn(1, 3, 8, 8),) for _ in range(4)]
    with torch.no_grad():
        reference = model(*batches[0])
    return model, batches, reference


@pytest.mark.filterwarnings("ignore")  # the peers' own, which are not ours to fix
def test_executorch_peers_when_run_then_count_one_conv_and_one_linear(case):
    model, batches, reference = case
    floating = peers.executorch_float(model, batches[0])
    quantized = peers.executorch_int8(model, batches[0], batches)
    assert sqnr_db([reference], floating.run(*batches[0])) > MIN_FLOAT_DB
    assert sqnr_db([reference], quantized.run(*batches[0])) > MIN_INT8_DB
    assert count_ops(floating).floating == {"conv": 1, "linear": 1}
    assert count_ops(quantized).integer == {"conv": 1, "linear": 1}
    assert {"prepare", "calibrate", "convert", "lower"} <= quantized.stages.keys()


@pytest.mark.filterwarnings("ignore")
def test_onnx_peers_when_run_then_count_one_conv_and_one_linear(case):
    model, batches, reference = case
    floating = peers.onnx_float(model, batches[0])
    quantized = peers.onnx_static(floating.data, batches)
    exported = peers.torchao_onnx(model, batches[0], batches)
    assert sqnr_db([reference], floating.run(*batches[0])) > MIN_FLOAT_DB
    for program in (quantized, exported):
        assert sqnr_db([reference], program.run(*batches[0])) > MIN_INT8_DB
    assert count_ops(floating).floating == {"conv": 1, "linear": 1}
    assert count_ops(quantized).integer == {"conv": 1, "linear": 1}

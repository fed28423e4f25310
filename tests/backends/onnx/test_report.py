"""The report: what is left in float is named with its module, and what it costs."""

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq

pytestmark = pytest.mark.usefixtures("integers_everywhere")


class Gated(nn.Module):
    """A convolution whose result a tanh reads, which has no integer form."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh())
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x))


def test_report_when_a_float_operator_stands_between_then_its_region_is_named() -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 3, 8, 8)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(Gated().eval(), (batch,)), backend.quantizer())
    pq.calibrate(prepared, [(batch,)], progress=False)
    report = backend.lower(pq.convert_pt2e(prepared)).report
    assert report.integer_ops["QLinearConv"] == 2
    assert report.float_ops == {"Tanh": 1}
    (float_region,) = report.float_regions
    assert float_region.what == "DequantizeLinear for Tanh"
    assert "in stem.0" in float_region.node
    assert float_region.cost
    assert any("no integer Tanh" in record.reason for record in report.provenance.floats)
    assert "2 dequantize" in report.notes[0]
    assert "Tanh" in str(report)


def test_report_when_sizes_are_counted_then_they_are_of_file_and_float_constants() -> None:
    torch.manual_seed(0)
    model = nn.Linear(256, 128)
    batch = torch.randn(2, 256)
    backend = pq.backends.get("onnx")
    prepared = pq.prepare_pt2e(torch.export.export(model.eval(), (batch,)), backend.quantizer())
    pq.calibrate(prepared, [(batch,)], progress=False)
    artifact = backend.lower(pq.convert_pt2e(prepared))
    assert artifact.report.float_size_bytes == 4 * (256 * 128 + 128)
    assert artifact.report.size_bytes == artifact.size_bytes == len(artifact.model)

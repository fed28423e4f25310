"""Where ONNX Runtime computes one operator otherwise in integers, it alone runs in float."""

import onnx_ir as ir
import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.onnx.rewrites import pipeline
from pt2e_quant.core.errors import ArtifactError

pytest.importorskip("onnxruntime")


def forget_biases(graph: ir.Graph) -> int:
    """A fault in integers alone: products of dequantized values lose their bias."""
    for node in graph:
        source = node.inputs[0].producer() if node.op_type in ("Conv", "Gemm") else None
        is_integer = source is not None and source.op_type == "DequantizeLinear"
        if is_integer and len(node.inputs) > 2:
            node.replace_input_with(2, None)
    return 0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.last = nn.Linear(4, 5, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize("recipe", ["int8", "a16w8"])
def test_product_when_the_check_convicts_its_integers_then_float(monkeypatch, recipe):
    monkeypatch.setattr(pipeline, "REWRITES", (forget_biases, *pipeline.REWRITES))
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = Net().eval()
    nn.init.constant_(model.conv.bias, 3.0)
    artifact = pq.quantize(
        model, (x,), calibration_data=[(x,)], backend="onnx", recipe=recipe, progress=False
    )
    regions = artifact.report.float_regions
    (region,) = (r for r in regions if "differs from the canonical graph" in r.reason)
    assert region.node in ("conv2d", "relu")
    assert region.what == "runs in float"
    assert pq.sqnr_db(model(x), artifact.run(x)) > 25


def test_product_when_float_does_not_help_then_the_first_refusal(monkeypatch):
    def forget_always(graph):
        for node in graph:
            if node.op_type == "Conv" and len(node.inputs) > 2:
                node.replace_input_with(2, None)
        return 0

    monkeypatch.setattr(pipeline, "REWRITES", (forget_always, *pipeline.REWRITES))
    torch.manual_seed(0)
    x = torch.randn(4, 3, 8, 8)
    model = Net().eval()
    nn.init.constant_(model.conv.bias, 3.0)
    with pytest.raises(ArtifactError, match="differs from the canonical graph") as caught:
        pq.quantize(model, (x,), calibration_data=[(x,)], backend="onnx", progress=False)
    assert caught.value.node_name in ("conv2d", "relu")

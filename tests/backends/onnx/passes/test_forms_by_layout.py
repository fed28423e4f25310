"""Batch norms behind functions, and nearest resizes, beside float and integer convolutions."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from pt2e_quant.backends.target import islands
from pt2e_quant.backends.target.speed_classes import Work
from pt2e_quant.backends.target.times import Timed

pytest.importorskip("onnxruntime")
import onnx

ONNX = pq.backends.get("onnx")
INTEGERS = ONNX.allowing_slower()


class Block(nn.Module):
    """Convolutions, each with a GELU and a batch norm behind it, and a residual."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 16, 3), nn.Conv2d(16, 16, 3, padding=1)
        self.third = nn.Conv2d(16, 4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(2))

    def forward(self, x):
        x = self.norms[0](nn.functional.gelu(self.first(x)))
        return self.third(x + self.norms[1](nn.functional.gelu(self.second(x))))


def block():
    torch.manual_seed(0)
    model = Block()
    for norm in model.norms:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return model.eval()


def lowered(monkeypatch, float_ns, size=(1, 4, 20, 20)):
    """The artifact where a multiplication takes 1 ns in integers, and its operators by type."""
    conv = Timed(Work("conv", (4, 8, 9, 400), 1000), {"integer": 1.0, "float": float_ns})
    moves = Timed(Work("convert", (2000,), 1000), {"quantize": 1.0, "dequantize": 1.0})
    monkeypatch.setattr(islands, "times_here", lambda _: {"conv": [conv], "convert": [moves]})
    model, x = block(), torch.randn(size)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(model, (torch.cat([x, x]),), dynamic_shapes=shapes)
    prepared = pq.prepare(program, ONNX.quantizer("int8"), effort="fast")
    artifact = ONNX.lower(pq.convert(pq.calibrate(prepared, [(x,)], progress=False)))
    types = [node.op_type for node in onnx.load_from_string(artifact.model).graph.node]
    return model, x, artifact, types


def test_affine_when_beside_float_convolutions_then_a_batch_norm(monkeypatch):
    model, x, artifact, types = lowered(monkeypatch, float_ns=0.1)
    assert types.count("BatchNormalization") == 2
    for batch in (x, torch.randn(3, 4, 20, 20)):
        with torch.no_grad():
            assert sqnr_db([model(batch)], [artifact.run(batch)]) > 30


def test_affine_when_between_integer_convolutions_then_a_product_and_a_sum(monkeypatch):
    model, x, artifact, types = lowered(monkeypatch, float_ns=10.0)
    assert "BatchNormalization" not in types
    assert artifact.report.integer_ops["QLinearConv"] == 3
    with torch.no_grad():
        assert sqnr_db([model(x)], [artifact.run(x)]) > 25


class Resized(nn.Module):
    """A nearest resize between what gives and what takes images."""

    def __init__(self, first, size=None, factor=None, mode="nearest"):
        super().__init__()
        self.first, self.last = first, nn.Conv2d(4, 4, 3)
        self.options = {"size": size, "scale_factor": factor, "mode": mode}

    def forward(self, x):
        return self.last(nn.functional.interpolate(self.first(x), **self.options))


def lowered_resize(model):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 9, 7)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=shapes)
    prepared = pq.prepare(program, INTEGERS.quantizer("int8"), effort="fast")
    graph = pq.convert(pq.calibrate(prepared, [(x,)], progress=False))
    artifact = INTEGERS.lower(graph)
    return graph, artifact, [n.op_type for n in onnx.load_from_string(artifact.model).graph.node]


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@pytest.mark.parametrize(
    "options", [{"factor": 2}, {"factor": (1.7, 3.0)}, {"size": (5, 20)}, {"size": (9, 13)}]
)
def test_resize_when_behind_an_integer_convolution_then_selections_of_the_same_values(
    mode, options
):
    graph, artifact, types = lowered_resize(
        Resized(nn.Conv2d(4, 4, 3, padding=1), mode=mode, **options)
    )
    assert "Resize" not in types
    assert "Gather" in types
    for batch in (1, 3):
        x = torch.randn(batch, 4, 9, 7)
        torch.testing.assert_close(artifact.run(x), graph(x), rtol=0, atol=2e-2)


def test_resize_when_its_channels_are_first_then_one_operator():
    graph, artifact, types = lowered_resize(Resized(nn.Identity(), factor=2))
    assert "Resize" in types
    assert "Gather" not in types
    x = torch.randn(3, 4, 9, 7)
    torch.testing.assert_close(artifact.run(x), graph(x), rtol=0, atol=2e-2)

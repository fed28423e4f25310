"""Softmaxes of channels, roots and PReLUs, in the operators that ONNX Runtime computes fast."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq

pytest.importorskip("onnxruntime")
import onnx


class Shares(nn.Module):
    """A softmax of a convolution's channels, or of its rows."""

    def __init__(self, name, dim):
        super().__init__()
        self.conv, self.name, self.dim = nn.Conv2d(3, 4, 3, padding=1), name, dim

    def forward(self, x):
        return getattr(torch, self.name)(self.conv(x), self.dim)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize(("dim", "rank"), [(1, 3), (-3, 3), (0, 2), (2, 4), (3, 4)])
def test_softmax_when_axes_are_behind_it_then_of_one_axis_more(name, dim, rank, is_dynamic):
    torch.manual_seed(0)
    model, x = Shares(name, dim).eval(), torch.randn(2, 3, 8, 6)
    sizes = {n: torch.export.Dim(f"d{n}", max=99) for n in (0, 2, 3)}
    artifact = pq.quantize(
        model,
        (x,),
        dynamic_shapes=[sizes] if is_dynamic else None,
        calibration_data=[x],
        backend="onnx",
        progress=False,
    )
    graph = onnx.shape_inference.infer_shapes(onnx.load_from_string(artifact.model)).graph
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in [*graph.value_info, *graph.output]}
    wanted = {"softmax": "Softmax", "log_softmax": "LogSoftmax"}[name]
    if name == "softmax":
        assert artifact.report.integer_ops["QLinearSoftmax"] == 1
    found = [ranks[n.output[0]] for n in graph.node if n.op_type == wanted]
    assert found == [rank]
    for batch in (x, torch.randn(5, 3, 10, 4)) if is_dynamic else (x,):
        assert pq.sqnr_db(model(batch), artifact.run(batch)) > 25


@pytest.mark.parametrize(("exponent", "op"), [(0.5, "Sqrt"), (-0.5, "Sqrt"), (-1, "Reciprocal")])
def test_power_when_it_is_a_root_or_reciprocal_then_so(exponent, op):
    class Powers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x):
            return (self.layer(x).abs() + 1) ** exponent

    torch.manual_seed(0)
    model, x = Powers().eval(), torch.randn(4, 8)
    artifact = pq.quantize(model, (x,), calibration_data=[x], backend="onnx", progress=False)
    types = {node.op_type for node in onnx.load_from_string(artifact.model).graph.node}
    assert op in types
    assert "Pow" not in types
    assert pq.sqnr_db(model(x), artifact.run(x)) > 30


class Slopes(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 1)
        self.slopes = nn.PReLU(count)

    def forward(self, x):
        return self.last(self.slopes(self.first(x)))


@pytest.mark.parametrize(("count", "op"), [(1, "LeakyRelu"), (5, "Min")])
def test_prelu_when_it_has_one_slope_then_a_leaky_relu_else_its_parts(count, op):
    torch.manual_seed(0)
    model, x = Slopes(count).eval(), torch.randn(2, 3, 9, 9)
    artifact = pq.quantize(model, (x,), calibration_data=[x], backend="onnx", progress=False)
    types = {node.op_type for node in onnx.load_from_string(artifact.model).graph.node}
    assert {"LeakyRelu", "Min", "PRelu"} & types == {op}
    assert pq.sqnr_db(model(x), artifact.run(x)) > 25

"""A max-pool in float in front of integers: ONNX Runtime computes it in float."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from benchmarks.measure import sqnr_db
from pt2e_quant.backends.target import islands
from pt2e_quant.backends.target.speed_classes import Work
from pt2e_quant.backends.target.times import Timed

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

ONNX = pq.backends.get("onnx")


def lowered(monkeypatch, first_float_ns):
    """A stem with a pool and an integer convolution; times of the stem are those of 3 channels."""

    def conv(channels, ns):
        return Timed(Work("conv", (channels, 16, 9, 400), 1000), {"integer": 1.0, "float": ns})

    moves = {"quantize": 1.0, "dequantize": 1.0, "reorder": 1.0, "transpose": 1.0}
    table = {
        "conv": [conv(3, first_float_ns), conv(16, 10.0)],
        "convert": [Timed(Work("convert", (2000,), 1000), moves)],
        "max_pool2d": [Timed(Work("max_pool2d", (2000,), 1000), {"integer": 16.0})],
    }
    monkeypatch.setattr(islands, "times_here", lambda _: table)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.Conv2d(16, 16, 3))
    ).eval()
    x = torch.randn(2, 3, 24, 24)
    shapes = ({0: torch.export.Dim("batch", min=1, max=8)},)
    program = torch.export.export(model, (x,), dynamic_shapes=shapes)
    prepared = pq.prepare(program, ONNX.quantizer("int8"), effort="fast")
    artifact = ONNX.lower(pq.convert(pq.calibrate(prepared, [(x,)], progress=False)))
    return model, artifact


def pooled_dtype(artifact, folder):
    """The dtype that a pool reads in what ONNX Runtime makes of the file."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    onnxruntime.InferenceSession(artifact.model, options, ["CPUExecutionProvider"])
    graph = onnx.load(folder / "optimized.onnx").graph
    (pool,) = (node for node in graph.node if node.op_type == "MaxPool")
    dtypes = {value.name: value.type.tensor_type.elem_type for value in graph.value_info}
    return dtypes[pool.input[0]]


@pytest.mark.parametrize(("first_float_ns", "is_float"), [(0.1, True), (10.0, False)])
def test_pool_when_its_convolution_is_in_float_then_so_is_it(
    monkeypatch, tmp_path, first_float_ns, is_float
):
    model, artifact = lowered(monkeypatch, first_float_ns)
    assert artifact.report.integer_ops["QLinearConv"] == (1 if is_float else 2)
    assert (pooled_dtype(artifact, tmp_path) == onnx.TensorProto.FLOAT) == is_float
    for size in (1, 3):
        batch = torch.randn(size, 3, 24, 24)
        with torch.no_grad():
            assert sqnr_db([model(batch)], [artifact.run(batch)]) > 30

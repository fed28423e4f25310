"""Where ONNX Runtime computes one operator otherwise in integers, it alone runs in float."""

import onnx
import onnx_ir as ir
import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.onnx.rewrites import pipeline
from pt2e_quant.backends.target import islands, leave_slower, speed_classes
from pt2e_quant.core.errors import ArtifactError

pytest.importorskip("onnxruntime")

ONNX = pq.backends.get("onnx")
POOL = "avg_pool2d, < 65536 elements"


@pytest.fixture(autouse=True)
def _one_by_one(monkeypatch):
    """Operators are judged alone here; what islands of them cost is `test_islands`' matter."""
    monkeypatch.setattr(islands, "times_here", lambda _: {})


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


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.last(nn.functional.avg_pool2d(self.first(x).relu(), 3, 1, 1))


def _pooled(*allowed, sizes=None):
    torch.manual_seed(0)
    x = torch.randn(2 if sizes else 1, 4, 24, 24)
    quantizer = ONNX.quantizer("int8").allowing(*allowed)
    program = torch.export.export(Pooled().eval(), (x,), dynamic_shapes=sizes)
    prepared = pq.prepare_pt2e(program, quantizer)
    return pq.convert_pt2e(pq.calibrate(prepared, [(x,)], progress=False), progress=False), x


def _slow_pools(node, backend):
    return 0.1 if node.target is torch.ops.aten.avg_pool2d.default else None


def test_pool_when_its_class_measured_slower_then_it_alone_runs_in_float(monkeypatch):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow_pools)
    gm, x = _pooled()
    artifact = ONNX.lower(gm)
    found = artifact.report.integer_ops
    assert found["QLinearConv"] == 2
    assert "QLinearAveragePool" not in found
    (region,) = [r for r in artifact.report.float_regions if r.node == "avg_pool2d"]
    assert "0.10 times as fast" in region.reason
    assert "--allow-slower" in region.reason
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-6)


DYNAMIC = {
    "batch": ({0: torch.export.Dim.DYNAMIC},),
    "image": ({i: torch.export.Dim.DYNAMIC for i in (0, 2, 3)},),
}


@pytest.mark.parametrize("is_saved", [False, True], ids=["at_once", "from_archive"])
@pytest.mark.parametrize("dynamic", DYNAMIC)
def test_pool_when_sizes_are_dynamic_then_judged_by_the_example(
    monkeypatch, tmp_path, dynamic, is_saved
):
    monkeypatch.setattr(speed_classes, "read_ratios", lambda package, path: {POOL: 0.1})
    gm, _ = _pooled(sizes=DYNAMIC[dynamic])
    if is_saved:
        pq.save(gm, tmp_path / "program.pt2")
        gm = pq.load(tmp_path / "program.pt2")
    artifact = ONNX.lower(gm)
    assert "QLinearAveragePool" not in artifact.report.integer_ops
    assert "avg_pool2d" in {region.node for region in artifact.report.float_regions}
    for batch in (1, 5):
        x = torch.randn(batch, 4, 24, 24)
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-6)


def test_pool_when_the_example_is_small_then_integers(monkeypatch):
    monkeypatch.setattr(speed_classes, "read_ratios", lambda package, path: {POOL: 0.1})
    monkeypatch.setattr(leave_slower, "LEAST_LEFT", 2 * 8 * 24 * 24 + 1)
    report = ONNX.lower(_pooled(sizes=DYNAMIC["batch"])[0], verify=False).report
    assert report.integer_ops["QLinearAveragePool"] == 1


@pytest.mark.parametrize("asked", ["quantizer", "backend", "option"])
def test_pool_when_slower_is_allowed_then_integers(monkeypatch, asked):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow_pools)
    gm, _ = _pooled(*(["slower"] if asked == "quantizer" else []))
    backend = ONNX.allowing_slower() if asked == "backend" else ONNX
    options = {"allow_slower": True} if asked == "option" else {}
    report = backend.lower(gm, verify=False, **options).report
    assert report.integer_ops["QLinearAveragePool"] == 1


def test_pool_when_its_result_is_small_then_integers(monkeypatch):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow_pools)
    monkeypatch.setattr(leave_slower, "LEAST_LEFT", 8 * 24 * 24 + 1)
    report = ONNX.lower(_pooled()[0], verify=False).report
    assert report.integer_ops["QLinearAveragePool"] == 1


def test_conv_when_its_class_measured_slower_then_its_weight_stays_integers(monkeypatch):
    slow = torch.ops.aten.conv2d.default
    monkeypatch.setattr(leave_slower, "ratio_here", lambda n, _: 0.1 if n.target is slow else None)
    artifact = ONNX.lower(_pooled()[0])
    assert artifact.report.integer_ops["QLinearConv"] == 1  # the last one's result is small
    assert "conv2d" in {r.node for r in artifact.report.float_regions}
    weights = [
        i for i in onnx.load_from_string(artifact.model).graph.initializer if "weight" in i.name
    ]
    assert any(i.data_type == onnx.TensorProto.INT8 for i in weights)

"""Operators whose class measured slower in integers run in float between their q/dq."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.target import leave_slower, speed_classes
from pt2e_quant.backends.xnnpack.backend import BACKEND

ATEN = torch.ops.aten
LINEAR = "linear, >= 16 rows, < 16384 weights"


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.tall, self.last = (nn.Conv2d(4, 4, k, 1, "same") for k in (1, 3, 1))

    def forward(self, x):
        x = self.tall(self.first(x).relu()).relu()
        return self.last(x * x.sigmoid())


class Lines(nn.Module):
    """Convolutions of lines, whose form in the file is another in float."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv1d(4, 4, 5, padding=2), nn.Conv1d(4, 4, 3, padding=1)

    def forward(self, x):
        return self.last(self.first(x).relu())


def _converted(model, x, *allowed, sizes=None):
    quantizer = BACKEND.quantizer("int8").allowing(*allowed)
    program = torch.export.export(model.eval(), (x,), dynamic_shapes=sizes)
    prepared = pq.prepare(program, quantizer)
    return pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)


def _slow(*targets):
    """A table in which some operators are slow, the layers by the size of their kernel."""

    def ratio(node, backend):
        assert backend == "xnnpack"
        is_slow = node.target in targets
        weight = node.all_input_nodes[1] if len(node.all_input_nodes) > 1 else node
        is_pointwise = weight.meta["val"].shape[-1] == 1
        return 0.2 if is_slow and not is_pointwise else None

    return ratio


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(leave_slower, "LEAST_LEFT", 1)


@pytest.mark.parametrize("is_dynamic", [False, True], ids=["static", "dynamic"])
def test_conv_when_its_class_measured_slower_then_it_alone_runs_in_float(monkeypatch, is_dynamic):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow(ATEN.conv2d.padding))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    batch = torch.export.Dim("batch", max=8)
    gm = _converted(Net(), x, sizes=({0: batch},) if is_dynamic else None)
    artifact = BACKEND.lower(gm)
    (region,) = [r for r in artifact.report.float_regions if r.node == "conv2d_1"]
    assert "0.20 times as fast" in region.reason
    assert "--allow-slower" in region.reason
    assert artifact.report.integer_ops["Conv2d"] == 2
    assert artifact.report.float_ops["Conv2d"] == 1
    assert artifact.report.integer_ops["Sigmoid"] == 1
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 50
    contents = artifact.contents()
    assert len(contents.delegates) == 1  # it stays in the delegate


def test_products_when_slower_then_float_in_the_delegate_and_functions_integers(monkeypatch):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow(ATEN.sigmoid.default, ATEN.mul.Tensor))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    gm = _converted(Net(), x)
    artifact = BACKEND.lower(gm)
    assert artifact.report.integer_ops["Conv2d"] == 3
    assert artifact.report.integer_ops["Sigmoid"] == 1  # a look-up in a table
    assert artifact.report.float_ops == {"Multiply": 1}
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 50


def test_lines_when_their_class_measured_slower_then_as_the_graph_says(monkeypatch):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow(ATEN.conv1d.default))
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16)
    gm = _converted(Lines(), x)
    artifact = BACKEND.lower(gm)
    assert {r.node for r in artifact.report.float_regions} >= {"conv1d", "conv1d_1"}
    assert "Conv2d" not in artifact.report.integer_ops
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 50


@pytest.mark.parametrize(("cache", "is_float"), [(4 * 8 * 8, True), (4 * 8 * 8 - 1, False)])
def test_conv_when_its_result_exceeds_the_cache_then_it_is_to_be_slower_by_more(
    monkeypatch, cache, is_float
):
    monkeypatch.setattr(
        leave_slower, "ratio_here", lambda node, _: 0.7 if "conv" in str(node) else 1
    )
    monkeypatch.setattr(leave_slower, "IN_CACHE", cache)
    gm = _converted(nn.Conv2d(4, 4, 3, padding=1), torch.randn(1, 4, 8, 8))
    report = BACKEND.lower(gm, verify=False).report
    assert report.float_ops.get("Conv2d", 0) == is_float


@pytest.mark.parametrize("asked", ["quantizer", "backend", "option"])
def test_conv_when_slower_is_allowed_then_integers(monkeypatch, asked):
    monkeypatch.setattr(leave_slower, "ratio_here", _slow(ATEN.conv1d.default))
    gm = _converted(Lines(), torch.randn(2, 4, 16), *(["slower"] if asked == "quantizer" else []))
    backend = BACKEND.allowing_slower() if asked == "backend" else BACKEND
    options = {"allow_slower": True} if asked == "option" else {}
    report = backend.lower(gm, verify=False, **options).report
    assert report.integer_ops["Conv2d"] == 2


def test_linear_when_its_weight_is_shared_then_both_run_in_float(monkeypatch):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(16, 16)

        def forward(self, x):
            return self.inner(self.inner(x).relu())

    monkeypatch.setattr(speed_classes, "read_ratios", lambda package, path: {LINEAR: 0.1})
    torch.manual_seed(0)
    x = torch.randn(32, 16)
    gm = _converted(Tied(), x)
    artifact = BACKEND.lower(gm)
    assert artifact.report.float_ops["FullyConnected"] == 2
    assert len(artifact.contents().delegates) == 1
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 50

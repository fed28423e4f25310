"""Trials of parts in float: which win by the clock is planted, what is made of it is real."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends import measure_speed
from pt2e_quant.backends.target import islands
from pt2e_quant.core.canonical import verify_canonical
from pt2e_quant.core.qdq import is_quantize

pytest.importorskip("onnxruntime")

ONNX = pq.backends.get("onnx")


class Net(nn.Module):
    """Two integer regions, float between them; a pool in the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x).relu()
        x = self.second(nn.functional.avg_pool2d(x, 2))
        return self.last(self.norm(x.mean((2, 3))).exp())


@pytest.fixture(scope="module")
def converted():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    program = torch.export.export(
        Net().eval(), (x,), dynamic_shapes=({0: torch.export.Dim("batch", max=8)},)
    )
    prepared = pq.prepare(program, ONNX.quantizer("int8"))
    with pytest.MonkeyPatch.context() as patch:
        # All in integers at first, also what is known to be slower.
        patch.setattr(islands, "times_here", lambda _: {})
        gm = pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)
    return gm, x


def plant(monkeypatch, wins):
    """Trials take half a call's time where `wins` says so of the operators in both artifacts."""
    seen = []

    def least_us(artifacts, leaves):
        best, trial = (dict(one.report.integer_ops) for one in artifacts)
        seen.append((best, trial))
        return [100.0, 50.0 if wins(best, trial) else 99.0]

    monkeypatch.setattr(measure_speed, "_least_us", least_us)
    return seen


def lost(kind, many):
    return lambda best, trial: best.get(kind, 0) - trial.get(kind, 0) == many


def lowered(gm, **options):
    return ONNX.lower(gm, measure=True, **options)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    monkeypatch.setattr(measure_speed, "_MOST", 2)
    # So small a model may be slower than float, which warns.
    monkeypatch.setattr("pt2e_quant.backends.target.lower.measure_speed", lambda *_: None)


def test_pool_when_its_class_wins_then_it_alone_runs_in_float(monkeypatch, converted):
    gm, x = converted
    seen = plant(monkeypatch, lost("QLinearAveragePool", 1))
    artifact = lowered(gm)
    assert seen[0][0]["QLinearAveragePool"] == 1
    found = artifact.report.integer_ops
    assert "QLinearAveragePool" not in found
    assert found["QLinearConv"] == 2
    (region,) = [r for r in artifact.report.float_regions if r.node == "avg_pool2d"]
    assert "a call took 100 us on this machine, 50 us with avg_pool2d, < 4096" in region.reason
    assert "--allow-slower" in region.reason
    for batch in (1, 2, 7):
        x = torch.randn(batch, 3, 12, 12)
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-4)


def test_region_when_it_wins_then_the_quantizes_inside_are_gone(monkeypatch, converted):
    gm, x = converted
    plant(monkeypatch, lambda best, trial: not trial.get("QLinearConv") and best.get("QGemm"))
    artifact = lowered(gm)
    assert set(artifact.report.integer_ops) <= {"QGemm", "MatMulIntegerToFloat", "Transpose"}
    assert {"conv2d", "conv2d_1"} <= {r.node for r in artifact.report.float_regions}
    assert sum(map(is_quantize, artifact.quantized.graph.nodes)) < sum(
        map(is_quantize, gm.graph.nodes)
    )
    verify_canonical(artifact.quantized)
    assert pq.sqnr_db(artifact.quantized(x), artifact.run(x)) > 60
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 25


def test_program_when_nothing_wins_then_it_is_what_it_was(monkeypatch, converted):
    gm, x = converted
    seen = plant(monkeypatch, lambda best, trial: False)
    artifact = lowered(gm)
    assert seen
    assert all(best == seen[0][0] for best, _ in seen)
    assert artifact.report.integer_ops == ONNX.lower(gm, verify=False).report.integer_ops
    torch.testing.assert_close(artifact.run(x), gm(x), rtol=0, atol=1e-4)


def test_program_when_slower_is_allowed_then_nothing_is_tried(monkeypatch, converted):
    seen = plant(monkeypatch, lambda best, trial: True)
    artifact = lowered(converted[0], allow_slower=True)
    assert seen == []
    assert artifact.report.integer_ops["QLinearConv"] == 2


def test_rows_when_a_linear_of_run_time_scales_wins_then_its_weight_stays_integers(monkeypatch):
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).eval(),
        torch.ones(4, 64),
    )
    prepared = pq.prepare(torch.export.export(model, (x,)), ONNX.quantizer("int8_dynamic"))
    plant(monkeypatch, lambda best, trial: True)
    artifact = lowered(pq.convert(prepared, progress=False))
    assert "MatMulIntegerToFloat" not in artifact.report.integer_ops
    assert artifact.report.size_bytes < 2 * 64 * 64 * 4 * 0.6
    assert pq.sqnr_db(model(x), artifact.run(x)) > 35


def test_times_when_a_part_is_slow_then_the_clock_says_so(converted):
    gm, x = converted
    artifact = ONNX.lower(gm, verify=False)
    alike = measure_speed._least_us((artifact, artifact), [x])
    assert 0.5 < alike[0] / alike[1] < 2


@pytest.mark.slow
def test_delegate_when_a_region_wins_then_float_in_the_delegate(monkeypatch):
    pytest.importorskip("executorch")
    backend = pq.backends.get("xnnpack")
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    prepared = pq.prepare(torch.export.export(Net().eval(), (x,)), backend.quantizer("int8"))
    gm = pq.convert(pq.calibrate(prepared, [(x,)], progress=False), progress=False)
    plant(monkeypatch, lambda best, trial: not trial.get("Conv2d") and best.get("FullyConnected"))
    artifact = backend.lower(gm, measure=True)
    assert "Conv2d" not in artifact.report.integer_ops
    assert artifact.report.float_ops["Conv2d"] == 2
    assert {"conv2d", "conv2d_1"} <= {r.node for r in artifact.report.float_regions}
    assert pq.sqnr_db(artifact.quantized(x), artifact.run(x)) > 60

"""Trials of speed: what is timed, and what is said of an artifact that is slower than float."""

import re
import time
import warnings

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.backends.measure_speed import measure_speed, times_in_turn
from pt2e_quant.core.errors import Pt2eQuantWarning


@pytest.fixture(scope="module")
def lowered():
    """The converted graph of a small model, and its artifact, measured."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    backend = pq.backends.get("onnx")
    program = torch.export.export(model, (torch.randn(4, 64),))
    prepared = pq.prepare_pt2e(program, backend.quantizer("int8"))
    pq.calibrate(prepared, [(torch.randn(4, 64),)], progress=False)
    converted = pq.convert_pt2e(prepared, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Pt2eQuantWarning)  # so small a model may be slower
        # Nothing is tried in float: all of so small a model may win there.
        return converted, backend.lower(converted, verify=False, measure=True, allow_slower=True)


class Slowed:
    """An artifact whose calls take some milliseconds longer."""

    def __init__(self, artifact, extra_s: float) -> None:
        self.artifact, self.extra_s = artifact, extra_s
        self.report = artifact.report

    def run_leaves(self, leaves):
        time.sleep(self.extra_s)
        return self.artifact.run_leaves(leaves)

    def time_operators(self, leaves):
        return self.artifact.time_operators(leaves)

    def reset(self) -> None:
        self.artifact.reset()


def test_lower_when_measured_then_the_report_has_both_times(lowered):
    _, artifact = lowered
    assert artifact.report.call_us > 0
    assert artifact.report.float_call_us > 0
    ratio = artifact.report.float_call_us / artifact.report.call_us
    assert f"{ratio:.2f}x float" in str(artifact.report)


def test_lower_when_not_measured_then_there_are_no_times(lowered):
    artifact = pq.backends.get("onnx").lower(lowered[0], verify=False)
    assert artifact.report.call_us is None
    assert "speed on this machine" not in str(artifact.report)


def test_measure_when_slower_than_float_then_operators_are_named(lowered):
    _, artifact = lowered
    leaves = (torch.randn(4, 64),)
    with pytest.warns(Pt2eQuantWarning) as told:
        measure_speed(Slowed(artifact, 0.01), artifact, leaves)
    text = str(told[0].message)
    assert re.search(r"0\.\d\dx the speed of the float program", text)
    assert "goes into conversion" in text
    assert "--keep-float" in text


def test_measure_when_faster_than_float_then_nothing_is_warned(lowered):
    _, artifact = lowered
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measure_speed(artifact, Slowed(artifact, 0.01), (torch.randn(4, 64),))


def test_measure_when_only_weights_are_quantized_then_such_recipes_are_named(lowered):
    _, artifact = lowered
    slowed = Slowed(artifact, 0.01)
    weights = [t for t in artifact.report.provenance.tensors if t.role == "weight"]
    table = pq.Provenance(tensors=weights)
    slowed.report = pq.Report(backend="ONNX Runtime", provenance=table)
    with pytest.warns(Pt2eQuantWarning, match="a8w4_g32 for w4_g32"):
        measure_speed(slowed, artifact, (torch.randn(4, 64),))


def test_times_in_turn_when_time_is_up_then_three_rounds_are_kept():
    times = times_in_turn([lambda: time.sleep(0.002), lambda: None], rounds=1000, seconds=0.0)
    assert [len(found) for found in times] == [3, 3]
    assert min(times[0]) >= 2000 > min(times[1])

"""Ranges end where the functions behind a tensor stop telling values apart."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import pt2e_quant as pq
from pt2e_quant.analysis.tensor_values import tensor_values
from pt2e_quant.passes.algorithms.saturation_limits import TOLERANCE, limits

pytestmark = pytest.mark.usefixtures("unmeasured")


class Net(nn.Module):
    """A convolution with outputs between about -12 and 12, a function and a reader of that."""

    def __init__(self, function, *, reads_both: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.after = nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 3)
        with torch.no_grad():
            self.conv.weight.mul_(6)
        self.function, self.reads_both = function, reads_both

    def forward(self, x):
        y = self.conv(x)
        z = self.after(self.function(y))
        return (z, y.flatten(1).sum(1)) if self.reads_both else z


def images(count: int = 8, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [2 * torch.randn(1, 4, 12, 12, generator=generator) for _ in range(count)]


def written_silu(x):
    return x * torch.sigmoid(x)


def converted(model, backend="onnx", *, with_limits=True, effort="fast"):
    quantizer = pq.backends.get(backend).quantizer("int8")
    if not with_limits:
        quantizer.remove_algorithm("saturation_limits")
    data = images()
    program = torch.export.export(model.eval(), (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer, effort=effort)
    return pq.convert_pt2e(pq.calibrate(prepared, data, progress=False))


def narrowed(gm) -> list[tuple[float, float]]:
    """The narrowed ranges, by scale and zero point."""
    found = []
    for record in pq.provenance_of(gm).tensors:
        if any("saturation_limits" in step for step in record.steps):
            scale, zero = float(record.scale[0]), int(record.zero_point[0])
            found.append(((record.quant_min - zero) * scale, (record.quant_max - zero) * scale))
    return found


def sqnr(model, gm) -> float:
    held = images(8, seed=2)
    with torch.no_grad():
        return pq.sqnr_db([model(x) for x in held], [gm(x) for x in held])


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
@pytest.mark.parametrize(
    ("function", "low"),
    [(F.hardswish, -3.3), (F.silu, -9.0), (written_silu, -9.0), (F.gelu, -4.5)],
)
def test_range_when_a_function_saturates_below_then_it_starts_there(backend, function, low):
    model = Net(function)
    plain, gm = (converted(model, backend, with_limits=on) for on in (False, True))
    assert not narrowed(plain)
    ((start, end),) = narrowed(gm)
    observed = [r.observed for r in pq.provenance_of(plain).tensors if r.name == "conv2d"]
    assert low < start < -1.0
    assert end == pytest.approx(observed[0][1], rel=0.02)
    assert sqnr(model, gm) > sqnr(model, plain) + 0.3


@pytest.mark.parametrize("backend", ["onnx", "xnnpack"])
def test_artifact_when_a_range_is_narrowed_then_it_computes_what_the_graph_does(backend):
    gm = converted(Net(F.hardswish), backend, effort=None)
    assert narrowed(gm)
    held = images(4, seed=3)
    with torch.no_grad():
        expected = [gm(x) for x in held]
    artifact = pq.backends.get(backend).lower(gm)
    assert pq.sqnr_db(expected, [artifact.run(x) for x in held]) > 35


@pytest.mark.parametrize("form", ["graph", "artifact"])
def test_compare_when_a_range_is_narrowed_then_values_that_nobody_reads_are_no_error(form):
    model = Net(F.hardswish)
    plain, gm = (converted(model, with_limits=on) for on in (False, True))
    record = pq.provenance_of(gm).tensor("conv2d")
    assert record.observed == pq.provenance_of(plain).tensor("conv2d").observed
    assert record.read_range is not None
    data = images(4)
    program = torch.export.export(model.eval(), (data[0],))
    other = gm if form == "graph" else pq.backends.get("onnx").lower(gm)
    row = pq.compare(program, other, data, progress=False).node("conv2d")
    before = pq.compare(program, plain, data, progress=False).node("conv2d")
    assert row.own_sqnr_db > before.own_sqnr_db
    assert row.share_clipped == 0
    assert {a.rule for a in pq.advise(gm, pq.compare(program, gm, data, progress=False))} == set()


def test_compare_when_values_are_beyond_what_was_observed_then_they_are_an_error():
    model = Net(F.hardswish)
    gm = converted(model)
    program = torch.export.export(model.eval(), (images(1)[0],))
    row = pq.compare(program, gm, [4 * x for x in images(4)], progress=False).node("conv2d")
    assert row.share_clipped > 0.01
    assert row.own_sqnr_db < 20


def test_report_when_a_range_is_narrowed_then_values_that_nobody_reads_are_not_clipped():
    gm = converted(Net(F.hardswish))
    table = tensor_values(gm, images(4))
    (value,) = [value for value in table.values if value.name == "conv2d"]
    assert value.share_clipped == 0
    (loss,) = [loss for loss in table.losses if loss.name == "conv2d"]
    assert loss.sqnr_db > 25


def test_range_when_something_else_reads_the_tensor_then_as_observed():
    assert not narrowed(converted(Net(F.hardswish, reads_both=True)))


@pytest.mark.parametrize(("name", "low", "high"), [("silu", -99, -12), ("hardswish", -3.5, -3)])
def test_range_when_a_result_is_also_read_in_float_then_it_has_to_be_constant(name, low, high):
    class Both(Net):
        def forward(self, x):
            y = self.function(self.conv(x))
            return self.after(y), torch.cumsum(y, 1)

    ((start, _),) = narrowed(converted(Both(getattr(F, name))))
    assert low < start < high


@pytest.mark.parametrize("function", [torch.abs, lambda x: x * 0.5, lambda x: F.leaky_relu(x, 0.3)])
def test_range_when_a_function_tells_all_values_apart_then_as_observed(function):
    assert not narrowed(converted(Net(function)))


def test_range_when_somebody_chose_the_observer_then_as_observed():
    data, model = images(), Net(F.hardswish)
    quantizer = pq.backends.get("onnx").quantizer("int8")
    quantizer.with_observers(activation=pq.MinMaxObserver)
    program = torch.export.export(model.eval(), (data[0],))
    prepared = pq.prepare_pt2e(program, quantizer)
    assert not narrowed(pq.convert_pt2e(pq.calibrate(prepared, data, progress=False)))


FUNCTIONS = (F.hardswish, F.silu, F.gelu, torch.sigmoid, torch.tanh, F.hardsigmoid, F.relu6, F.elu)


@given(
    function=st.sampled_from(FUNCTIONS),
    low=st.floats(-50, 0),
    high=st.floats(0.01, 50),
    tolerance=st.floats(0, 0.5),
)
@settings(deadline=None, max_examples=100)
def test_limits_when_values_are_beyond_then_the_function_changes_by_less_than_the_tolerance(
    function, low, high, tolerance
):
    x = torch.linspace(low, high, 999)
    values = function(x).double()
    start, end = limits(x, [(values, tolerance)])
    assert float(x[0]) <= start <= 0 <= end <= float(x[-1])
    for outside, edge in ((values[x <= start], start), (values[x >= end], end)):
        if len(outside) and edge:
            at = function(torch.tensor(edge)).double()
            assert float((outside - at).abs().max()) <= tolerance + 1e-5


def test_limits_when_a_function_is_constant_below_then_exactly_there():
    x = torch.linspace(-8, 8, 1601)
    start, end = limits(x, [(F.relu(x), 0.0)])
    assert (start, end) == (pytest.approx(0.0, abs=0.02), pytest.approx(8.0))
    assert math.isclose(limits(x, [(F.relu6(x), 0.0)])[1], 6.0, abs_tol=0.02)
    assert 0 < TOLERANCE < 0.5  # less than what rounds to another integer

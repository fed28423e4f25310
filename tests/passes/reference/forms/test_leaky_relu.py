"""leaky_relu as XNNPACK has it: a multiplier of 8 fraction bits for each sign."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

import pt2e_quant as pq
from pt2e_quant.backends.registry import get
from pt2e_quant.core.integer_ops.profiles import profile_named
from tests.passes.reference.forms.between import Between, qp, steps_apart, written

XNNPACK = profile_named("xnnpack")
EVERY = torch.arange(-128, 128).to(torch.int8)
SCALES = st.floats(0.005, 0.2).map(lambda value: float(torch.tensor(value)))


def nearest_even(value: float) -> int:
    below = math.floor(value)
    rest = value - below
    return below + (rest > 0.5 or (rest == 0.5 and below % 2 == 1))


def as_in_xnnpack(q: int, x: tuple, y: tuple, slope: float) -> int:
    """src/qs8-vlrelu/gen/qs8-vlrelu-scalar-select-u1.c, in Python's integers."""
    ratio = torch.tensor(x[0]) / torch.tensor(y[0])
    positive = nearest_even(float(256.0 * ratio))
    negative = nearest_even(float(256.0 * (ratio * torch.tensor(slope))))
    difference = q - x[1]
    total = (y[1] << 8) + 0x80 + difference * (positive if difference >= 0 else negative)
    return min(max(total >> 8, y[2]), y[3])


@settings(max_examples=40, deadline=None)
@given(
    x=st.tuples(SCALES, st.integers(-128, 127)),
    y=st.tuples(SCALES, st.integers(-128, 127)),
    slope=st.floats(-0.9, 0.9),
)
def test_leaky_relu_when_on_xnnpack_then_as_its_source(x, y, slope):
    x, y = qp(*x), qp(*y)
    model = Between(lambda v: functional.leaky_relu(v, slope), [x], y)
    _, after, notes = written(model, EVERY, profile=XNNPACK)
    assert not [note for note in notes if note.skipped]
    assert after(EVERY).tolist() == [as_in_xnnpack(q, x, y, slope) for q in EVERY.tolist()]


def test_leaky_relu_when_elsewhere_then_the_graphs_own():
    x, y = (qp(float(torch.tensor(scale)), zero) for scale, zero in ((0.05, 3), (0.03, -100)))
    model = Between(lambda v: functional.leaky_relu(v, 0.1), [x], y)
    assert steps_apart(model, EVERY) == 0


@pytest.mark.parametrize("slope", [0.01, 0.2, -0.5])
def test_leaky_relu_when_run_by_xnnpack_then_all_integers_are_equal(slope):
    pytest.importorskip("executorch")
    torch.manual_seed(0)
    x = torch.randn(64, 160)
    program = torch.export.export(nn.LeakyReLU(slope), (x,))
    prepared = pq.prepare_pt2e(program, pq.IntegerQuantizer(), int_only=True)
    quantized = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    artifact = get("xnnpack").lower(quantized, verify=False)
    assert artifact.report.integer_ops["LeakyReLU"] == 1
    found = pq.verify_parity(artifact, [x])
    assert (found.share_equal, found.most_steps) == (1.0, 0.0)

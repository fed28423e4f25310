"""Operators with a factor for each channel, against the float operator and Python's fractions."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from pt2e_quant.core.integer_ops.norms import affine_factors
from pt2e_quant.core.integer_ops.profiles import DEFAULT, PROFILES
from pt2e_quant.core.integer_ops.requantize import output_range
from pt2e_quant.core.qparams import QParams
from pt2e_quant.passes.reference.forms.registry import FORMS
from pt2e_quant.passes.reference.forms.site import Arithmetic, Operand, Output, computed
from tests.passes.reference.forms.between import (
    IMAGE,
    A,
    Between,
    Slopes,
    Y,
    integers,
    qp,
    steps_apart,
    written,
)

aten = torch.ops.aten
PRELU, BATCH_NORM = (
    next(form for form in FORMS if form.name == name) for name in ("prelu", "batch norm")
)
WIDE = qp(1e-4, 77, torch.int16)


def operand(values, scale, zero_point, dtype) -> Operand:
    limits = torch.iinfo(dtype)
    qparams = QParams.per_tensor(scale, zero_point, limits.min, limits.max, dtype)
    stored = torch.tensor(values, dtype=dtype)
    return Operand(value=stored, like=stored, qparams=qparams)


def output(scale, zero_point, dtype) -> Output:
    limits = torch.iinfo(dtype)
    qparams = QParams.per_tensor(scale, zero_point, limits.min, limits.max, dtype)
    return Output(qparams=qparams, range=output_range(qparams, dtype))


DTYPES = st.sampled_from([torch.int8, torch.uint8, torch.int16])
SCALES = st.floats(1e-4, 0.5).map(lambda v: torch.tensor(v).item())


@st.composite
def channels(draw):
    """Integers [1, C, L] of a type, and both scales and zero points."""
    dtype, to = draw(DTYPES), draw(DTYPES)
    limits, ends = torch.iinfo(dtype), torch.iinfo(to)
    C, L = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    every = st.integers(limits.min, limits.max)
    rows = draw(st.lists(st.lists(every, min_size=L, max_size=L), min_size=C, max_size=C))
    x = operand([rows], draw(SCALES), draw(every), dtype)
    return x, output(draw(SCALES), draw(st.integers(ends.min, ends.max)), to)


def of_multiplier(steps: int, factor: Fraction) -> int:
    """steps * factor by a multiplier of 31 bits, as TOSA has it, in Python's integers."""
    fraction, exponent = math.frexp(float(factor))
    multiplier, shift = math.floor(fraction * 2**31 + 0.5), 31 - exponent
    if multiplier == 0 or shift > 62:
        return 0
    return steps * multiplier + (1 << (shift - 1)) >> shift if shift > 0 else steps << -shift


@settings(max_examples=60, deadline=None)
@given(channels(), st.data())
def test_prelu_when_tosa_then_equal_to_python_integers(given_channels, data):
    x, to = given_channels
    slopes = [data.draw(st.floats(-2, 2, width=32)) for _ in range(x.like.shape[1])]
    arguments = {"self": x, "weight": torch.tensor(slopes)}
    arithmetic = Arithmetic(PROFILES["tosa"])
    found = computed(PRELU, aten.prelu.default, arguments, to, arithmetic)
    ratio = Fraction(x.qparams.scale.double().item()) / Fraction(to.qparams.scale.double().item())
    for at, slope in enumerate(torch.tensor(slopes).tolist()):
        for q, y in zip(x.value[0, at].tolist(), found[0, at].tolist(), strict=True):
            steps = q - x.qparams.zero_point_int
            factor = ratio
            if steps < 0:
                steps = -steps if slope < 0 else steps
                scaled = x.qparams.scale.double().item() * abs(slope)
                factor = Fraction(scaled / to.qparams.scale.double().item())
            made = of_multiplier(steps, factor) + to.range.zero_point
            assert y == min(max(made, to.range.low), to.range.high)


@settings(max_examples=60, deadline=None)
@given(channels(), st.data())
def test_batch_norm_when_computed_then_the_exact_sum_is_rounded_once(given_channels, data):
    x, to = given_channels
    draw = lambda low, high: torch.tensor(  # noqa: E731
        [data.draw(st.floats(low, high, width=32)) for _ in range(x.like.shape[1])]
    )
    weight, bias, mean, var = draw(-4, 4), draw(-4, 4), draw(-4, 4), draw(0.125, 8)
    arguments = {
        "input": x,
        "weight": weight,
        "bias": bias,
        "running_mean": mean,
        "running_var": var,
        "training": False,
        "momentum": 0.1,
        "eps": 1e-5,
        "cudnn_enabled": False,
    }
    found = computed(BATCH_NORM, aten.batch_norm.default, arguments, to, Arithmetic(DEFAULT))
    scale = weight.double() / torch.sqrt(var.double() + 1e-5)
    shift = bias.double() - mean.double() * scale
    to_scale = Fraction(to.qparams.scale.double().item())
    for at in range(x.like.shape[1]):
        for q, y in zip(x.value[0, at].tolist(), found[0, at].tolist(), strict=True):
            steps = q - x.qparams.zero_point_int
            real = Fraction(scale[at].item()) * Fraction(x.qparams.scale.double().item()) * steps
            exact = (real + Fraction(shift[at].item())) / to_scale + to.range.zero_point
            clamped = min(max(exact, to.range.low), to.range.high)
            assert abs(y - clamped) <= Fraction(1, 2) + Fraction(1, 1000)


def test_affine_when_factors_are_too_large_then_there_are_none():
    given_sizes = {"reach": 255, "input_scale": 1.0, "output_scale": 1.0}
    one = torch.ones(1)
    assert affine_factors(one * 2.0**40, one, **given_sizes) is None
    assert affine_factors(one, one * torch.inf, **given_sizes) is None


SLOPES = torch.tensor([0.3, -0.7, 0.0, 1.4])


@pytest.mark.parametrize("profile", ["default", "tflite", "onednn", "onnxruntime_x86"])
def test_prelu_when_written_then_within_one_step(profile):
    for kind in (A, WIDE):
        model = Slopes(SLOPES, inputs=kind)
        assert steps_apart(model, integers(IMAGE, kind), profile=PROFILES[profile]) <= 1
    assert steps_apart(Slopes(SLOPES), integers((3, 4), A), profile=PROFILES[profile]) <= 1


def test_prelu_when_it_has_one_slope_then_equal_to_the_qdq_graph():
    every = torch.arange(-128, 128).to(torch.int8)
    assert steps_apart(Slopes(torch.tensor([0.37])), every) == 0


def test_prelu_when_its_slopes_are_computed_then_it_stays_float():
    class Computed(nn.Module):
        def forward(self, x, slopes):
            return functional.prelu(x, slopes * 2.0)

    _, _, notes = written(Between(Computed(), [A], Y), integers(IMAGE, A), SLOPES)
    assert "its weight is no float constant of this graph" in [n.text for n in notes if n.skipped]


NORMS = {
    "instance": lambda: nn.InstanceNorm2d(4, affine=True),
    "instance_plain": lambda: nn.InstanceNorm2d(4),
    "instance_running": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "instance_1d": lambda: nn.InstanceNorm1d(4, affine=True),
    "batch": lambda: nn.BatchNorm2d(4),
    "batch_plain": lambda: nn.BatchNorm2d(4, affine=False),
}


@pytest.mark.parametrize("kind", [A, WIDE], ids=["int8", "int16"])
@pytest.mark.parametrize("name", list(NORMS))
def test_norms_of_channels_when_written_then_within_one_step(name, kind):
    torch.manual_seed(0)
    norm = NORMS[name]()
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.5, 1.0)
    if norm.track_running_stats:
        nn.init.uniform_(norm.running_mean, -0.5, 0.5)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    shape = (2, 4, 15) if name == "instance_1d" else IMAGE
    model = Between(lambda x: functional.relu(norm.eval()(x)), [kind], Y)
    model.norm = norm
    assert steps_apart(model, integers(shape, kind)) <= 1


def test_batch_norm_when_it_normalises_by_the_batch_then_it_stays_float():
    norm = nn.BatchNorm2d(4, track_running_stats=False)
    model = Between(norm, [A], Y)
    model.norm = norm
    _, _, notes = written(model, integers(IMAGE, A))
    assert "it normalises by statistics of the batch" in [n.text for n in notes if n.skipped]

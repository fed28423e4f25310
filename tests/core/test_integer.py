import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.integer import (
    Rounding,
    longest_inner_axis,
    multiplier_of,
    requantize_fixed,
    saturate,
    shift_right,
)
from pt2e_quant.core.integer_ops.profiles import Requantization

INT32 = st.integers(-(2**31), 2**31 - 1)
ACCUMULATORS = st.lists(
    INT32
    | st.integers(-300, 300)
    | st.sampled_from([-(2**31), 2**31 - 1, 2**24 + 1, -(2**24) - 1]),
    min_size=1,
    max_size=20,
)
OUTPUTS = st.sampled_from([(0, -128, 127), (-128, -128, 127), (3, 0, 255), (7, -8, 7)])


def rounded(value: Fraction, rounding: Rounding) -> int:
    """The oracle: Python fractions of unlimited size."""
    floor = math.floor(value)
    rest = value - floor
    half = Fraction(1, 2)
    goes_up = {
        Rounding.FLOOR: False,
        Rounding.HALF_UP: rest >= half,
        Rounding.HALF_AWAY: rest > half or (rest == half and value > 0),
        Rounding.HALF_EVEN: rest > half or (rest == half and floor % 2 == 1),
    }[rounding]
    return floor + goes_up


@settings(max_examples=100)
@given(
    values=st.lists(st.integers(-(2**62), 2**62) | st.integers(-20, 20), min_size=1, max_size=10),
    shift=st.integers(0, 62) | st.integers(0, 3),
    rounding=st.sampled_from(list(Rounding)),
)
def test_shift_right_when_any_int64_then_equals_python(values, shift, rounding):
    result = shift_right(torch.tensor(values), shift, rounding)
    assert result.tolist() == [rounded(Fraction(v, 1 << shift), rounding) for v in values]


@settings(max_examples=100)
@given(factors=st.lists(st.floats(2.0**-31, 2.0**30), min_size=1, max_size=8))
def test_multiplier_when_made_then_nearest_in_31_bits(factors):
    multiplier = multiplier_of(torch.tensor(factors, dtype=torch.float64))
    for factor, value, shift in zip(
        factors, multiplier.value.tolist(), multiplier.shift.tolist(), strict=True
    ):
        assert 2**30 <= value < 2**31
        assert 0 <= shift <= 62
        # Half a unit in the last of 31 bits.
        assert abs(Fraction(value, 1 << shift) - Fraction(factor)) * (1 << shift) <= Fraction(1, 2)


@pytest.mark.parametrize("bits", [1, 3, 8, 16])
def test_multiplier_when_of_few_bits_then_nearest_of_those(bits):
    factors = [0.0003, 0.3, 0.74, 0.999, 1.0, 5.5]
    multiplier = multiplier_of(torch.tensor(factors, dtype=torch.float64), bits)
    for factor, value, shift in zip(
        factors, multiplier.value.tolist(), multiplier.shift.tolist(), strict=True
    ):
        unit = 1 << (31 - bits)
        assert value % unit == 0
        assert 2**30 <= value < 2**31
        real = Fraction(value, 1 << shift)
        assert abs(real - Fraction(factor)) * (1 << shift) <= Fraction(unit, 2)


def test_multiplier_when_too_small_to_matter_then_zero():
    multiplier = multiplier_of(torch.tensor([0.0, 1e-12]))
    assert multiplier.value.tolist() == [0, 0]
    x = torch.tensor([-(2**31), 2**31 - 1]).reshape(2, 1)
    q = requantize_fixed(x, multiplier, zero_point=5, quant_min=-128, quant_max=127)
    assert q.tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("factor", [-1.0, 2.0**31, math.inf, math.nan])
def test_multiplier_when_out_of_range_then_refuses(factor):
    with pytest.raises(ConfigError, match="requantization factor"):
        multiplier_of(torch.tensor([factor]))


# Plain-integer transcriptions of the specifications, one number at a time.


def tosa(value: int, multiplier: int, shift: int, *, double_round: bool) -> int:
    """TOSA 1.0, apply_scale_32."""
    round_ = 1 << (shift - 1)
    if double_round and shift > 31:
        round_ += 1 << 30 if value >= 0 else -(1 << 30)
    return (value * multiplier + round_) >> shift


def truncated(a: int, b: int) -> int:
    """C's division."""
    return abs(a) // abs(b) * (1 if (a >= 0) == (b >= 0) else -1)


def tflite(value: int, multiplier: int, shift: int) -> int:
    """MultiplyByQuantizedMultiplier of kernels/internal/common.cc; the shift is to the left."""
    left, right = max(shift, 0), max(-shift, 0)
    x = max(-(2**31), min(2**31 - 1, value * (1 << left)))
    product = x * multiplier
    nudge = (1 << 30) if product >= 0 else 1 - (1 << 30)
    high = truncated(product + nudge, 1 << 31)
    mask = (1 << right) - 1
    remainder = high & mask
    threshold = (mask >> 1) + (1 if high < 0 else 0)
    return (high >> right) + (1 if remainder > threshold else 0)


def one(value: int, multiplier: int, shift: int, kind: Requantization) -> int:
    if kind is Requantization.GEMMLOWP:
        return tflite(value, multiplier, 31 - shift)
    return tosa(value, multiplier, shift, double_round=kind is Requantization.TOSA_DOUBLE)


FIXED = [kind for kind in Requantization if kind.is_fixed]


@pytest.mark.parametrize("kind", FIXED)
def test_requantize_fixed_when_100_000_cases_then_equals_the_specification(kind):
    generator = torch.Generator().manual_seed(0)
    count = 100_000
    wide = torch.randint(-(2**31), 2**31, (count,), generator=generator)
    # Few bits as well as many, so that ties come up.
    values = wide >> torch.randint(0, 31, (count,), generator=generator)
    exponents = torch.randint(-31, 12, (count,), generator=generator).double()
    mantissas = torch.rand(count, generator=generator, dtype=torch.float64) / 2 + 0.5
    mantissas[::4] = (mantissas[::4] * 8).round() / 8
    factors = multiplier_of(mantissas * 2.0**exponents)
    found = requantize_fixed(
        values, factors, zero_point=0, quant_min=-(2**62), quant_max=2**62, kind=kind
    )
    cases = zip(values.tolist(), factors.value.tolist(), factors.shift.tolist(), strict=True)
    assert found.tolist() == [one(*case, kind) for case in cases]


@settings(max_examples=100)
@given(
    values=ACCUMULATORS,
    factor=st.floats(1e-9, 1e3) | st.sampled_from([0.5, 0.25, 0.125]),
    output=OUTPUTS,
    kind=st.sampled_from(FIXED),
)
def test_requantize_fixed_when_any_int32_then_equals_python(values, factor, output, kind):
    zero_point, quant_min, quant_max = output
    multiplier = multiplier_of(torch.tensor([factor]))
    result = requantize_fixed(
        torch.tensor(values, dtype=torch.int64),
        multiplier,
        zero_point=zero_point,
        quant_min=quant_min,
        quant_max=quant_max,
        kind=kind,
    )
    real = multiplier.value.item(), multiplier.shift.item()
    expected = [max(quant_min, min(quant_max, one(v, *real, kind) + zero_point)) for v in values]
    assert result.tolist() == expected


def test_requantize_fixed_when_the_kind_is_of_floats_then_refuses():
    multiplier = multiplier_of(torch.tensor([0.5]))
    limits = {"zero_point": 0, "quant_min": -8, "quant_max": 7}
    with pytest.raises(ConfigError, match="multiplies in float"):
        requantize_fixed(torch.tensor([1]), multiplier, kind=Requantization.FLOAT32, **limits)


def test_requantize_fixed_when_per_channel_then_each_has_its_factor():
    x = torch.tensor([[10, 10], [20, 20]], dtype=torch.int32)
    factors = torch.tensor([0.5, 2.0])
    output = {"zero_point": 1, "quant_min": -128, "quant_max": 127}
    found = requantize_fixed(x, multiplier_of(factors), **output)
    assert found.tolist() == [[6, 21], [11, 41]]
    found = requantize_fixed(x, multiplier_of(factors[:, None]), **output)
    assert found.tolist() == [[6, 6], [41, 41]]


def test_longest_inner_axis_when_filled_then_still_int32():
    longest = longest_inner_axis(255, 128)
    assert longest * 255 * 128 <= 2**31 - 1 < (longest + 1) * 255 * 128


def test_saturate_when_outside_then_the_nearest_end():
    assert saturate(torch.tensor([-300, 5, 300]), -128, 127).tolist() == [-128, 5, 127]

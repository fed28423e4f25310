import math
from fractions import Fraction

import numpy as np
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
    requantize_scale,
    saturate,
    shift_right,
    zero_point_correction,
)

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


@settings(deadline=None, max_examples=100)
@given(
    values=st.lists(st.integers(-(2**62), 2**62) | st.integers(-20, 20), min_size=1, max_size=10),
    shift=st.integers(0, 62) | st.integers(0, 3),
    rounding=st.sampled_from(list(Rounding)),
)
def test_shift_right_when_any_int64_then_equals_python(values, shift, rounding):
    result = shift_right(torch.tensor(values), shift, rounding)
    assert result.tolist() == [rounded(Fraction(v, 1 << shift), rounding) for v in values]


@settings(deadline=None, max_examples=100)
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


def test_multiplier_when_too_small_to_matter_then_zero():
    multiplier = multiplier_of(torch.tensor([0.0, 1e-12]))
    assert multiplier.value.tolist() == [0, 0]
    x = torch.tensor([-(2**31), 2**31 - 1]).reshape(2, 1)
    q = requantize_fixed(x, multiplier, zero_point=5, quant_min=-128, quant_max=127, axis=1)
    assert q.tolist() == [[5, 5], [5, 5]]


@pytest.mark.parametrize("factor", [-1.0, 2.0**31, math.inf, math.nan])
def test_multiplier_when_out_of_range_then_refuses(factor):
    with pytest.raises(ConfigError, match="requantization factor"):
        multiplier_of(torch.tensor([factor]))


@settings(deadline=None, max_examples=100)
@given(
    values=ACCUMULATORS,
    factor=st.floats(1e-9, 1e3),
    output=OUTPUTS,
    rounding=st.sampled_from(list(Rounding)),
)
def test_requantize_fixed_when_any_int32_then_equals_python(values, factor, output, rounding):
    zero_point, quant_min, quant_max = output
    multiplier = multiplier_of(torch.tensor([factor]))
    result = requantize_fixed(
        torch.tensor(values, dtype=torch.int64),
        multiplier,
        zero_point=zero_point,
        quant_min=quant_min,
        quant_max=quant_max,
        rounding=rounding,
    )
    real = Fraction(multiplier.value.item(), 1 << multiplier.shift.item())
    expected = [
        max(quant_min, min(quant_max, rounded(v * real, rounding) + zero_point)) for v in values
    ]
    assert result.tolist() == expected


def test_requantize_fixed_when_per_channel_then_each_has_its_factor():
    x = torch.tensor([[10, 10], [20, 20]], dtype=torch.int32)
    multiplier = multiplier_of(torch.tensor([0.5, 2.0]))
    output = {"zero_point": 1, "quant_min": -128, "quant_max": 127}
    assert requantize_fixed(x, multiplier, axis=1, **output).tolist() == [[6, 21], [11, 41]]
    assert requantize_fixed(x, multiplier, axis=0, **output).tolist() == [[6, 6], [41, 41]]


def test_requantize_scale_when_made_then_multiplied_before_divided():
    a, b, c = (torch.tensor([v]) for v in (0.1, 0.3, 0.7))
    expected = np.float32(np.float32(np.float32(0.1) * np.float32(0.3)) / np.float32(0.7))
    assert requantize_scale(a, b, c).item() == expected


@settings(deadline=None, max_examples=100)
@given(
    seed=st.integers(0, 10_000),
    x_zero=st.integers(-128, 255),
    w_zeros=st.lists(st.integers(-128, 127), min_size=3, max_size=3),
    is_affine=st.booleans(),
)
def test_zero_point_correction_when_added_then_the_shifted_product(
    seed, x_zero, w_zeros, is_affine
):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-128, 256, (2, 4, 5), generator=generator)
    w = torch.randint(-128, 128, (3, 5), generator=generator)
    w_zero = torch.tensor(w_zeros if is_affine else [0, 0, 0])
    correction = (
        zero_point_correction(
            x_zero,
            w.sum(1),
            weight_zero_point=w_zero,
            input_sums=x.sum(-1, keepdim=True),
            inner_length=5,
        )
        if is_affine
        else zero_point_correction(x_zero, w.sum(1))
    )
    assert torch.equal(x @ w.T + correction, (x - x_zero) @ (w - w_zero[:, None]).T)


def test_zero_point_correction_when_input_sums_are_missing_then_refuses():
    with pytest.raises(ConfigError, match="input's sums"):
        zero_point_correction(1, torch.ones(2), weight_zero_point=3)


def test_longest_inner_axis_when_filled_then_still_int32():
    longest = longest_inner_axis(255, 128)
    assert longest * 255 * 128 <= 2**31 - 1 < (longest + 1) * 255 * 128


def test_saturate_when_outside_then_the_nearest_end():
    assert saturate(torch.tensor([-300, 5, 300]), -128, 127).tolist() == [-128, 5, 127]

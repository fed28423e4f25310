"""Softmax, exponentials and logarithms in integers against real ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.integer_ops.softmax import (
    Softmax,
    integer_logarithm,
    integer_power,
    softmax_factors,
)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([torch.int8, torch.uint8, torch.int16]),
    st.floats(1e-4, 13.0),
    st.integers(1, 1000),
    st.integers(0, 2**31 - 1),
)
def test_softmax_when_of_any_scores_then_within_its_bound(dtype, span, length, seed):
    generator, limits = torch.Generator().manual_seed(seed), torch.iinfo(dtype)
    x = torch.randint(limits.min, limits.max + 1, (2, length), generator=generator).to(dtype)
    scale = span / (limits.max - limits.min)
    real = torch.softmax(x.double() * scale, -1)
    scales, out = (scale, 2.0**-30), (0, 0, 1 << 30, torch.int32)
    found = Softmax(x, -1, *softmax_factors(*scales), *out).double() * scales[1]
    assert bool(((found - real).abs() <= 4e-6 * real + 2.0**-29 + scales[1] / 2).all())


def test_power_when_interpolated_then_within_its_bound():
    distance = torch.arange(0, 35 << 20, 997)
    real = torch.exp2(-distance.double() / (1 << 20))
    error = (integer_power(distance).double() / (1 << 30) - real).abs()
    assert float((error - 9.2e-7 * real).max()) <= 2.0**-29


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 2**62 - 1))
def test_logarithm_when_of_any_integer_then_within_its_bound(total):
    found = int(integer_logarithm(torch.tensor(total))) * 2.0**-30
    assert abs(found - math.log2(total)) <= 2.8e-6

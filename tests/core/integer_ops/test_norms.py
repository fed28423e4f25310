"""Softmax, roots and exponentials in integers against real ones."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.integer_ops.norms import (
    Softmax,
    integer_exp,
    integer_power,
    softmax_factors,
    square_root,
)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-7, 0.05), st.integers(1, 1000), st.integers(0, 2**31 - 1))
def test_softmax_when_of_more_bits_then_within_its_bound(scale, length, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-32768, 32768, (2, length), generator=generator).to(torch.int16)
    scales, limits = (scale, 2.0**-24), (0, 0, 1 << 30, torch.int32)
    found = Softmax(x, -1, *softmax_factors(*scales, torch.int32), *limits).double() * scales[1]
    real = torch.softmax(x.double() * scale, -1)
    assert float((found - real).abs().max()) <= 4e-6 + scales[1] / 2


def test_power_when_interpolated_then_within_its_bound():
    distance = torch.arange(0, 35 << 20, 997)
    real = torch.exp2(-distance.double() / (1 << 20))
    error = (integer_power(distance).double() / (1 << 30) - real).abs()
    assert float((error - 9.2e-7 * real).max()) <= 2.0**-29


def test_square_root_when_values_are_63_bit_then_exact():
    generator = torch.Generator().manual_seed(0)
    wide = torch.randint(0, 2**62, (2000,), generator=generator)
    values = wide >> torch.randint(0, 62, (2000,), generator=generator)
    roots = values.double().sqrt().long().clamp(max=2**31 - 1)
    values = torch.cat([values, roots**2, (roots**2 - 1).clamp(min=0), torch.tensor([2**63 - 1])])
    assert square_root(values).tolist() == [math.isqrt(v) for v in values.tolist()]


def test_exponential_when_integer_then_within_i_bert_s_bound():
    distance = torch.arange(0, 20 << 14, 7)
    real = torch.exp(-distance.double() / (1 << 14))
    found = integer_exp(distance).double() * 0.3585 / (1 << 28)
    # The polynomial's own 0.00213 (its coefficients have 3 digits), and 14 bits of the argument.
    assert float((found - real).abs().max()) <= 0.0022

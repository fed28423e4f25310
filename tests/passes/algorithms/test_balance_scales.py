"""The choice of factors: expected errors against what rounding does, and the signs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.passes.algorithms.balance_channels import (
    EXPONENTS,
    Balance,
    Rounding,
    choose_balance,
)
from pt2e_quant.passes.algorithms.channel_sizes import POWER, ChannelSizes

INT8 = Rounding(weight_steps=127.0, group_size=None, rounds_input=True, is_affine=True)
W4 = Rounding(weight_steps=7.5, group_size=None, rounds_input=False, is_affine=False)
NORM = 105.0 ** (1 / POWER)
"""The 8-norm of a standard normal."""


def normal_sizes(spread: torch.Tensor) -> ChannelSizes:
    """Of channels that are normal with mean 0."""
    spread = spread.double()
    half = spread * NORM / 2 ** (1 / POWER)
    return ChannelSizes(spread.square(), half, half)


def one_outlier(channels: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    spread = torch.ones(channels)
    spread[5] = 30.0
    return torch.randn(48, channels) / spread, spread


def test_factor_when_one_channel_is_large_then_it_alone_is_divided():
    weight, spread = one_outlier()
    found = choose_balance(weight, normal_sizes(spread), INT8)
    assert found.error < found.error_before / 10
    others = torch.cat((found.factors[:5], found.factors[6:]))
    assert found.factors[5] > 5 * others.max()
    assert (found.factors > 0).all()


def test_error_when_predicted_then_bounds_that_of_rounding():
    """Up to ten times too much: the 8-norm bounds a row's range, of one outlier most loosely."""
    weight, spread = one_outlier()
    x = torch.randn(4096, 64) * spread
    found = choose_balance(weight, normal_sizes(spread), INT8)
    for factors, expected in (
        (torch.ones(64), found.error_before),
        (found.factors.float(), found.error),
    ):
        rows, scaled = x / factors, weight * factors
        low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        step = (high - low) / 255
        scale = scaled.abs().amax(1, keepdim=True) / 127
        rounded = (rows / step).round() * step
        error = rounded @ ((scaled / scale).round() * scale).T - x @ weight.T
        measured = error.square().sum(1).mean()
        assert 1 < expected / measured < 10


def test_factor_when_tails_point_down_then_negative_and_the_range_is_half():
    torch.manual_seed(0)
    spread = torch.ones(32, dtype=torch.float64)
    long, short = spread * 4, spread * 0.1
    flipped = torch.arange(32) % 2 == 0
    sizes = ChannelSizes(
        spread, torch.where(flipped, short, long), torch.where(flipped, long, short)
    )
    found = choose_balance(torch.randn(16, 32), sizes, INT8)
    assert torch.equal(found.factors < 0, flipped)
    assert found.error < 0.45 * found.error_before
    kept = choose_balance(torch.randn(16, 32), sizes, INT8, keeps_sign=True)
    assert (kept.factors > 0).all()


@settings(max_examples=25)
@given(
    rows=st.integers(1, 9),
    channels=st.integers(1, 70),
    group=st.sampled_from([None, 8, 32]),
    seed=st.integers(0, 999),
    rounds_input=st.booleans(),
)
def test_choice_when_weights_and_sizes_are_any_then_no_worse_than_nothing(
    rows, channels, group, seed, rounds_input
):
    torch.manual_seed(seed)
    weight = torch.randn(rows, channels) * torch.randn(channels).mul(2).exp()
    if seed % 3 == 0:
        weight[:, ::2] = 0  # a channel, or the whole weight, without effect
    above, below = torch.randn(2, channels).double().exp()
    sizes = ChannelSizes(above.square() + below.square(), above, below)
    rounding = Rounding(
        weight_steps=7.5, group_size=group, rounds_input=rounds_input, is_affine=True
    )
    found = choose_balance(weight, sizes, rounding)
    assert found.error <= found.error_before * (1 + 1e-6)
    assert found.exponents in EXPONENTS
    assert found.factors.isfinite().all()
    assert (found.factors != 0).all()
    assert found.factors.abs().max() / found.factors.abs().min() < 1e6


def test_groups_when_a_large_channel_has_its_own_then_less_to_gain():
    weight, spread = one_outlier()
    grouped = Rounding(weight_steps=7.5, group_size=8, rounds_input=False, is_affine=False)
    gains = []
    for rounding in (W4, grouped):
        found = choose_balance(weight.abs() + 1, normal_sizes(spread), rounding)
        gains.append(found.error_before / found.error)
    assert gains[0] > gains[1] > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_exact_in_when_half_then_powers_of_two_with_their_signs(dtype):
    found = Balance(torch.tensor([0.7, -3.0, 1.0]).double(), (0.5, 0.0), 1.0, 2.0)
    factors = found.exact_in(dtype).factors
    half = torch.tensor([0.5, -4.0, 1.0]).double()
    assert torch.equal(factors, half if dtype is torch.bfloat16 else found.factors)


def test_step_when_balanced_then_says_exponents_signs_and_gain():
    found = Balance(torch.tensor([0.7, -3.0]).double(), (0.5, 0.15), 1.0, 10.0)
    assert found.step == (
        "/ size ** 0.5 * weight ** 0.15 per channel, 1 negative: 10.0 dB less error expected"
    )

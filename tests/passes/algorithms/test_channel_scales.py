import pytest
import torch

from pt2e_quant.observers.statistics.channel_statistics import ChannelStatistics
from pt2e_quant.passes.algorithms.channel_scales import (
    CANDIDATES,
    choose_channel_scale,
    family,
    weight_errors,
)
from pt2e_quant.passes.algorithms.grid import Declined


def observed(x: torch.Tensor) -> ChannelStatistics:
    found = ChannelStatistics()
    found(x)
    return found


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rounded(x: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    scale = (high.clamp(min=0) - low.clamp(max=0)) / 255
    zero = (-low.clamp(max=0) / scale).round()
    return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale


def test_expected_error_when_measured_on_unseen_data_then_within_a_factor_of_two():
    spread = torch.exp(noise(64, seed=1))
    x, unseen = noise(16, 32, 64) * spread, noise(64, 32, 64, seed=2) * spread
    weight = noise(24, 64, seed=3)
    choice = choose_channel_scale(observed(x), weight=weight, least_gain=1.0)
    scaled = x / choice.factors
    got = rounded(unseen / choice.factors, scaled.min(), scaled.max())
    grid = weight * choice.factors
    step = grid.abs().amax(1, keepdim=True) / 127
    error = got @ ((grid / step).round() * step).T - unseen @ weight.T
    measured = error.square().sum(-1).mean().item()
    assert measured / 2 < choice.error < measured * 2
    assert choice.error < choice.error_before / 3


def test_choice_when_channels_are_alike_then_declined():
    with pytest.raises(Declined, match="no channel scale lowers the expected error enough"):
        choose_channel_scale(observed(noise(16, 8, 32)), least_gain=1.5)


def test_choice_when_a_channel_is_rarely_large_then_it_keeps_headroom():
    x = noise(16, 64, 32).clamp(-1, 1)
    x[:, 0, :2] = 20.0
    both = choose_channel_scale(observed(x), least_gain=1.0).factors
    assert both[0] == both[1] > 4
    # without the blocks in which channel 0 is large, nothing says that it can be
    x[:, 0, 0] = 1.0
    x[::4, 0, 0] = 20.0
    with pytest.raises(Declined):
        choose_channel_scale(observed(x), least_gain=1.0)


@pytest.mark.parametrize("width", [20, 65, 300])
def test_weight_errors_when_channels_are_grouped_then_near_those_of_each_channel(width):
    statistics = observed(noise(16, 8, width) * torch.exp(noise(width, seed=1)))
    weight = noise(24, width, seed=3)
    factors = family(statistics.absmax[None])[:, 0]
    found = weight_errors(weight, statistics, factors)
    for error, factor in zip(found, factors, strict=True):
        step = (weight.abs() * factor).amax(1) / 127
        exact = step.square().sum() / 12 * (statistics.mean_square / factor.square()).sum()
        assert exact * 0.999 <= error <= exact * 1.3


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_choice_when_there_is_little_data_then_still_made(blocks):
    x = noise(blocks, 64, 32)
    x[..., 5] *= 50
    choice = choose_channel_scale(observed(x), least_gain=1.5)
    assert choice.factors.argmax() == 5
    assert choice.factors.min() == 1


def test_family_when_channels_are_zero_then_finite_and_at_least_one():
    absmax = torch.tensor([[0.0, 0.0, 0.0, 5.0], [0.0, 0.0, 0.0, 0.0]])
    factors = family(absmax)
    assert factors.shape == (len(CANDIDATES), 2, 4)
    assert torch.isfinite(factors).all()
    assert (factors >= 1).all()
    assert torch.equal(factors[0], torch.ones(2, 4))


def test_step_when_shown_then_says_rule_and_gain():
    x = noise(8, 16, 32)
    x[..., 5] *= 50
    text = choose_channel_scale(observed(x), least_gain=1.5).step
    assert text.startswith("/ max(absmax, quantile 0.")
    assert "dB less error expected" in text

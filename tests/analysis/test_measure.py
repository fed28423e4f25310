"""Figures of a pair of tensors, summed over batches."""

import math

import pytest
import torch

from pt2e_quant.analysis.measure import ChannelNoise, Noise, PairFigures, as_floats, outliers


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_as_floats_when_the_reference_is_masked_or_not_finite_then_zero_in_both():
    huge = torch.finfo(torch.float32).max
    a, b = as_floats(torch.tensor([1.0, -huge, math.nan, 4.0]), torch.tensor([1.5, 2.0, 3.0, 4.0]))
    assert a.tolist() == [1.0, 0.0, 0.0, 4.0]
    assert b.tolist() == [1.5, 0.0, 0.0, 4.0]
    # Two masks of opposite sign leave a finite sum.
    a, _ = as_floats(torch.tensor([huge, -huge, 1.0]), torch.ones(3))
    assert a.tolist() == [0.0, 0.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_figures_when_the_other_side_alone_is_not_finite_then_all_is_lost(value):
    a, b = draw(4, 8), draw(4, 8)
    b[2, 3] = value
    a, b = as_floats(a, b)
    noise, channels, pair = Noise(), ChannelNoise(), PairFigures()
    noise.add(a, b)
    channels.add(a, b)
    pair.add(a, b, (-9.0, 9.0))
    assert noise.sqnr_db == channels.error.sqnr_db == pair.error.sqnr_db == -math.inf
    assert noise.largest == pair.error.largest == math.inf
    assert channels.median_db == -math.inf  # the only channel with noise
    assert (pair.cosine, pair.elements) == (0.0, 32)
    assert math.isfinite(pair.kl)
    noise.add(draw(4, 8), draw(4, 8))
    assert noise.sqnr_db == -math.inf  # one good batch does not take it back


def test_noise_when_batches_are_added_then_as_of_all_at_once():
    a, b = draw(4, 8), draw(4, 8, seed=1)
    parts, whole = Noise(), Noise()
    whole.add(a, b)
    for x, y in zip(a, b, strict=True):
        parts.add(x, y)
    assert parts.sqnr_db == pytest.approx(whole.sqnr_db, abs=1e-4)
    assert parts.largest == whole.largest == float((a - b).abs().max())


def test_channel_noise_when_one_channel_has_the_signal_then_the_median_is_of_the_others():
    a = torch.ones(1, 5, 4, 4)
    a[:, 0] = 1000.0
    noise = ChannelNoise()
    noise.add(a, a + 0.5)
    assert noise.error.sqnr_db > 50
    assert noise.median_db == pytest.approx(10 * math.log10(1 / 0.25))


def test_pair_figures_when_batches_are_added_then_range_channels_and_clipped_are_of_all():
    figures = PairFigures()
    first, second = draw(2, 3, 4, 4), 2 * draw(2, 3, 4, 4, seed=1)
    for values in (first, second):
        figures.add(values, values.clamp(-1, 1), (-1.0, 1.0))
    both = torch.cat([first, second])
    assert (figures.low, figures.high) == (float(both.min()), float(both.max()))
    assert figures.clipped == int((both.abs() > 1).sum())
    assert torch.equal(figures.channels, both.abs().amax((0, 2, 3)))
    expected = torch.cosine_similarity(both.flatten(), both.clamp(-1, 1).flatten(), dim=0)
    assert figures.cosine == pytest.approx(float(expected), abs=1e-6)
    assert figures.kl > 0.1


def test_outliers_when_a_channel_stands_out_then_it_is_named():
    assert outliers(torch.tensor([1.0, 1.0, 20.0, 1.0, 1.0])) == (2,)
    assert outliers(torch.tensor([1.0, 20.0])) == ()

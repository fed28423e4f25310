import pytest
import torch

from pt2e_quant.observers.static.entropy import EntropyObserver


def normal(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def range_of(x, **kwargs):
    observer = EntropyObserver(**{"dtype": torch.int8, **kwargs})
    observer(x)
    low, high = observer.optimal_range()
    scale, _ = observer.calculate_qparams()
    assert float(scale) > 0
    return float(low), float(high)


def test_range_when_an_outlier_is_far_then_it_is_clipped():
    x = torch.cat([normal(100_000), torch.tensor([40.0])])
    low, high = range_of(x)
    assert high < 20.0
    assert low == pytest.approx(float(x.min()), rel=0.3)


def test_range_when_an_outlier_is_low_then_the_lower_end_is_clipped():
    x = torch.cat([normal(100_000), torch.tensor([-40.0])])
    low, high = range_of(x)
    assert low > -20.0
    assert high == pytest.approx(float(x.max()), rel=0.3)


def test_range_when_symmetric_then_both_ends_are_the_same():
    x = torch.cat([normal(100_000), torch.tensor([-40.0])])
    low, high = range_of(x, qscheme=torch.per_tensor_symmetric)
    assert low == -high
    assert 3.0 < high < 20.0


def test_range_when_nothing_is_negative_then_it_starts_at_zero():
    low, high = range_of(torch.relu(normal(50_000)), dtype=torch.uint8)
    assert low == 0.0
    assert 2.0 < high < 5.0


def test_range_when_uniform_then_nothing_is_clipped():
    x = torch.linspace(-1, 1, 100_001)
    low, high = range_of(x)
    assert low == pytest.approx(-1.0, abs=0.02)
    assert high == pytest.approx(1.0, abs=0.02)


def test_range_when_levels_outnumber_bins_then_all_of_the_data():
    x = normal(5_000)
    low, high = range_of(x, dtype=torch.int16)
    assert (low, high) == (float(x.min()), float(x.max()))


def test_range_when_far_from_zero_then_all_of_the_data():
    x = normal(5_000) * 1e-3 + 100.0
    low, high = range_of(x)
    assert (low, high) == (float(x.min()), float(x.max()))

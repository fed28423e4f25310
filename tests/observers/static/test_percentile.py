import pytest
import torch

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.static.percentile import PercentileObserver


def normal(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def observed(x, **kwargs):
    observer = PercentileObserver(dtype=torch.int8, **kwargs)
    for part in x.split(1000):
        observer(part)
    return observer


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
@pytest.mark.parametrize("relu", [False, True])
def test_range_when_affine_then_the_quantiles_of_the_data(percentile, relu):
    x = normal(20_000) + 0.3
    x = torch.relu(x) if relu else x
    observer = observed(x, percentile=percentile)
    low, high = observer.optimal_range()
    cut = (1 - percentile / 100) / 2
    # Within a bin of 1 / 512 nothing is known: at most some twenty elements lie there.
    assert abs(int((x < low).sum()) - cut * x.numel()) <= 20 or (relu and low == 0.0)
    assert abs(int((x > high).sum()) - cut * x.numel()) <= 20
    assert observer.grid.width <= 1 / 256


def test_range_when_symmetric_then_the_share_counts_magnitudes():
    x = torch.cat([normal(9_000), torch.zeros(1_000)])
    observer = observed(x, percentile=95.0, qscheme=torch.per_tensor_symmetric)
    low, high = observer.optimal_range()
    assert low == -high
    assert float((x.abs() <= high).double().mean()) == pytest.approx(0.95, abs=2e-3)


def test_range_when_the_percentile_is_100_then_all_of_the_data():
    x = normal(3_000)
    low, high = observed(x, percentile=100.0).optimal_range()
    assert (low, high) == (x.min(), x.max())


def test_range_when_mostly_zeros_then_zero_is_kept():
    x = torch.where(torch.arange(10_000) % 1000 == 0, normal(10_000).abs() + 1, 0.0)
    low, high = observed(x, percentile=99.0).optimal_range()
    assert (float(low), float(high)) == (0.0, 0.0)


@pytest.mark.parametrize("percentile", [0.0, 100.5])
def test_percentile_when_out_of_range_then_refused(percentile):
    with pytest.raises(ConfigError, match="percentile"):
        PercentileObserver(percentile=percentile)

"""Ranges that different rules find in one histogram."""

import pytest
import torch

from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.passes.algorithms.range_groups import (
    PERCENTILES,
    SQUARED,
    ChosenRangeObserver,
    RangeCandidates,
)

QSCHEMES = torch.per_tensor_affine, torch.per_tensor_symmetric


def tailed():
    x = torch.randn(50_000, generator=torch.Generator().manual_seed(0))
    x[::5000] *= 12
    return x


@pytest.mark.parametrize("qscheme", QSCHEMES)
def test_ranges_when_percentiles_then_those_of_the_percentile_observer(qscheme):
    found = RangeCandidates(dtype=torch.int8, qscheme=qscheme)
    found(tailed())
    for percentile in PERCENTILES:
        alone = PercentileObserver(percentile, dtype=torch.int8, qscheme=qscheme)
        alone(tailed())
        low, high = alone.optimal_range()
        assert found.ranges()[f"{percentile:g} %"] == (float(low), float(high))


def squared_error(x, ends):
    observer = ChosenRangeObserver(torch.int8, torch.per_tensor_affine)
    observer(x)
    observer.chosen = ends
    scale, zero_point = observer.calculate_qparams()
    rounded = torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -128, 127)
    return float((x - rounded).square().sum())


def test_ranges_when_squared_error_then_nearly_the_least_there_is():
    x = tailed()
    found = RangeCandidates(dtype=torch.int8)
    found(x)
    best = MSEObserver(dtype=torch.int8)
    best(x)
    least = squared_error(x, tuple(float(end) for end in best.optimal_range()))
    whole = squared_error(x, (float(x.min()), float(x.max())))
    assert squared_error(x, found.ranges()[SQUARED]) < min(1.02 * least, 0.9 * whole)


def test_chosen_range_when_given_then_it_counts_and_what_was_seen_stays():
    observer = ChosenRangeObserver(torch.quint8, torch.per_tensor_affine)
    observer(torch.tensor([-4.0, 8.0]))
    observer.chosen = (0.0, 2.55)
    scale, zero_point = observer.calculate_qparams()
    assert float(scale) == pytest.approx(0.01)
    assert int(zero_point) == 0
    assert float(observer.max_val) == 8.0

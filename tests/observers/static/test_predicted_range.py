import math

import pytest
import torch

from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.predicted_range import (
    MOST,
    PredictedRangeObserver,
    prediction_bound,
)


def draws(count: int, spread: float, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    return torch.exp(spread * torch.randn(count, generator=generator)).tolist()


@pytest.mark.parametrize("count", [4, 8, 32])
def test_bound_when_drawn_again_and_again_then_holds_for_99_percent(count):
    held = 0
    for trial in range(2000):
        *seen, following = draws(count + 1, 0.3, seed=trial)
        held += following <= prediction_bound(seen)
    # three standard deviations of 2000 draws at 99 %, and the expansion's error at few samples
    assert held / 2000 == pytest.approx(0.99, abs=0.007 + 0.01 * (count < 8))


def test_bound_when_maxima_are_equal_then_that_maximum():
    assert prediction_bound([3.0] * 8) == pytest.approx(3.0)


@pytest.mark.parametrize("batch", [1, 8])
def test_range_when_samples_vary_then_widened(batch):
    scales = torch.tensor(draws(8, 0.3))
    x = torch.randn(8, 100, generator=torch.Generator().manual_seed(1)) * scales[:, None]
    plain, wide = MinMaxObserver(), PredictedRangeObserver()
    for part in x.split(batch):
        assert wide(part) is part
        plain(part)
    expected = prediction_bound(x.abs().amax(1).tolist()) / x.abs().max().item()
    assert 1 < expected < MOST
    assert wide.margin == pytest.approx(expected)
    ratio = wide.calculate_qparams()[0] / plain.calculate_qparams()[0]
    assert ratio.item() == pytest.approx(expected, rel=1e-5)
    assert "99 % bound" in wide.steps[0]


def test_range_when_there_are_many_samples_then_as_observed():
    observer = PredictedRangeObserver()
    observer(torch.tensor(draws(512, 0.3))[:, None])
    assert observer.margin == 1
    assert observer.steps == []


@pytest.mark.parametrize(
    ("shape", "samples"),
    [((1, 8, 2, 2), 8), ((1, 5, 8), 8), ((1, 64), 2), ((64,), 8)],
    ids=["a feature map", "a sequence", "two samples", "one axis"],
)
def test_range_when_no_vector_or_hardly_calibrated_then_that_of_min_max(shape, samples):
    plain, wide = MinMaxObserver(), PredictedRangeObserver()
    for seed in range(samples):
        x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * (seed + 1)
        plain(x)
        wide(x)
    assert torch.equal(plain.calculate_qparams()[0], wide.calculate_qparams()[0])


def test_range_when_samples_differ_wildly_then_at_most_doubled():
    observer = PredictedRangeObserver()
    for scale in (1e-3, 1.0, 1e3):
        observer(torch.full((1, 4), scale))
    assert observer.margin == MOST
    assert math.isfinite(observer.calculate_qparams()[0].item())


def test_range_when_all_zero_or_reset_then_no_margin():
    observer = PredictedRangeObserver()
    for _ in range(4):
        observer(torch.zeros(1, 4))
    assert observer.margin == 1
    observer.reset_min_max_vals()
    assert not observer.seen


@pytest.mark.parametrize("dtype", [torch.int16, torch.uint16])
@pytest.mark.parametrize("shape", [(4, 8, 3, 3), (512, 8)], ids=["a feature map", "vectors"])
def test_range_when_there_are_16_bits_then_twice_what_was_seen(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    plain, wide = MinMaxObserver(dtype=dtype), PredictedRangeObserver(dtype=dtype)
    for observer in (plain, wide):
        observer(x)
    scales = [observer.calculate_qparams()[0].item() for observer in (plain, wide)]
    assert scales[1] == pytest.approx(2 * scales[0], rel=1e-6)
    assert "what calibration did not see" in wide.steps[0]


@pytest.mark.parametrize("size", [1e-5, 1e-9, 1e-15])
def test_scale_when_values_are_tiny_then_all_steps_are_used(size):
    observer = PredictedRangeObserver(dtype=torch.uint8)
    observer(torch.linspace(-1, 1, 100).view(1, 1, 100) * size)
    scale, _ = observer.calculate_qparams()
    assert scale.item() == pytest.approx(2 * size / 255, rel=1e-5)


def test_scale_when_only_zeros_were_seen_then_as_upstream():
    observer = PredictedRangeObserver(dtype=torch.uint8)
    observer(torch.zeros(1, 4, 4))
    upstream = MinMaxObserver(dtype=torch.uint8)
    upstream(torch.zeros(1, 4, 4))
    assert observer.calculate_qparams() == upstream.calculate_qparams()

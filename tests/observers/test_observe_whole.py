"""Observers that a compiler cannot follow: compiled code finds what eager mode does."""

import pytest
import torch

from pt2e_quant.observers.static.entropy import EntropyObserver
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.mse import MSEObserver
from pt2e_quant.observers.static.percentile import PercentileObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver

OBSERVERS = (
    EntropyObserver,
    HistogramObserver,
    MSEObserver,
    PercentileObserver,
    PredictedRangeObserver,
)


@pytest.mark.parametrize("kind", OBSERVERS)
def test_whole_observer_when_compiled_then_statistics_and_qparams_of_eager_mode(kind):
    eager, traced = kind(), kind()
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(compiled(x), eager(x))
    for name, held in eager.named_buffers():
        assert torch.equal(traced.get_buffer(name), held)
    find = torch.compile(traced.calculate_qparams, backend="aot_eager", fullgraph=True)
    for found, expected in zip(find(), eager.calculate_qparams(), strict=True):
        assert torch.equal(found.reshape(-1), expected.reshape(-1).to(found.dtype))

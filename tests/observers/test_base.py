import copy
import pickle

import pytest
import torch

from pt2e_quant.observers.partial_wrapper import PartialWrapper
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)
from pt2e_quant.observers.static.mse import MSEObserver

OBSERVERS = [
    MinMaxObserver,
    PerChannelMinMaxObserver,
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
    HistogramObserver,
    MSEObserver,
]


def data(seed=0, gain=1.0):
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(seed)) * gain


@pytest.mark.parametrize("make", OBSERVERS)
def test_observer_when_copied_pickled_or_twinned_then_goes_on_alone(make):
    observer = make()
    observer(data())
    twins = [copy.deepcopy(observer), pickle.loads(pickle.dumps(observer)), observer.twin()]
    before = observer.calculate_qparams()
    for twin in twins:
        assert all(map(torch.equal, twin.calculate_qparams(), before))
        twin(data(1, gain=50.0))
        assert twin.calculate_qparams()[0].max() > before[0].max()
    assert all(map(torch.equal, observer.calculate_qparams(), before))


@pytest.mark.parametrize("make", OBSERVERS)
def test_buffers_when_further_batches_come_then_keep_shape_and_storage(make):
    observer = make()
    observer(data())
    before = {name: (b.shape, b.data_ptr()) for name, b in observer.named_buffers()}
    for seed in range(1, 4):
        observer(data(seed, gain=seed * 3.0))
    assert {name: (b.shape, b.data_ptr()) for name, b in observer.named_buffers()} == before


@pytest.mark.parametrize("make", OBSERVERS)
def test_forward_when_gradients_flow_then_passes_them_through(make):
    x = data().requires_grad_()
    y = make()(x)
    assert y is x
    (y * 2).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


@pytest.mark.parametrize("make", OBSERVERS)
def test_forward_when_layout_is_channels_last_then_same_statistics(make):
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    one, other = make(), make()
    one(x)
    other(x.to(memory_format=torch.channels_last))
    assert all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize("make", OBSERVERS)
def test_half_precision_when_observed_then_statistics_are_float32(make):
    for dtype in (torch.float16, torch.bfloat16):
        observer, wide = make(), make()
        observer(data().to(dtype))
        wide(data().to(dtype).float())
        assert observer.min_val.dtype == torch.float32
        assert all(map(torch.equal, observer.calculate_qparams(), wide.calculate_qparams()))


def test_partial_wrapper_when_pickled_then_still_makes_observers():
    make = pickle.loads(pickle.dumps(MinMaxObserver.with_args(dtype=torch.int8)))
    assert isinstance(make, PartialWrapper)
    assert make().dtype == torch.int8


@pytest.mark.parametrize("make", OBSERVERS)
def test_forward_when_in_inference_mode_then_usable_outside_it(make):
    observer, plain = make(), make()
    with torch.inference_mode():
        observer(data())
    observer(data(1, gain=4.0))
    plain(data())
    plain(data(1, gain=4.0))
    assert all(map(torch.equal, observer.calculate_qparams(), plain.calculate_qparams()))


@pytest.mark.parametrize("make", OBSERVERS)
def test_load_when_state_comes_from_an_observer_then_qparams_are_the_same(make):
    observer, other = make(), make()
    observer(data())
    other.load_state_dict(observer.state_dict())
    assert all(map(torch.equal, other.calculate_qparams(), observer.calculate_qparams()))
    assert not any(
        a.data_ptr() == b.data_ptr()
        for a, b in zip(other.buffers(), observer.buffers(), strict=True)
    )

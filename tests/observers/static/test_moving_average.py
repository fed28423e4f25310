import pytest
import torch
from torch.ao.quantization import observer as upstream

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.static.moving_average import (
    MovingAverageMinMaxObserver,
    MovingAveragePerChannelMinMaxObserver,
)


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator) * scale for scale in (1.0, 5.0, 0.2, 2.0)]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (MovingAverageMinMaxObserver, upstream.MovingAverageMinMaxObserver),
        (MovingAveragePerChannelMinMaxObserver, upstream.MovingAveragePerChannelMinMaxObserver),
    ],
)
@pytest.mark.parametrize("constant", [0.01, 0.3, 1])
def test_average_when_given_batches_then_equals_torch_ao(ours, theirs, constant):
    mine, other = ours(averaging_constant=constant), theirs(averaging_constant=constant)
    for x in batches():
        assert mine(x) is x
        other(x)
    assert torch.equal(mine.min_val, other.min_val)
    assert torch.equal(mine.max_val, other.max_val)
    assert list(mine.state_dict()) == list(other.state_dict())


@pytest.mark.parametrize(
    "make", [MovingAverageMinMaxObserver, MovingAveragePerChannelMinMaxObserver]
)
def test_average_when_a_whole_batch_is_masked_then_nothing_changes(make):
    observer = make(averaging_constant=0.5)
    observer.ignore_at_or_below = -1e30
    masked = torch.full((1, 3), -torch.inf)
    observer(masked)
    assert not observer.seen
    observer(torch.tensor([[1.0, 2.0, -torch.inf]]))
    observer(masked)
    assert (observer.min_val.item(), observer.max_val.item()) == (1.0, 2.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("position", [0, 1])
def test_check_finite_when_any_batch_was_not_then_raises_ever_after(bad, position):
    observer = MovingAverageMinMaxObserver()
    data = [torch.ones(2), torch.ones(2), torch.ones(2)]
    data[position] = torch.tensor([1.0, bad])
    for x in data:
        observer(x)
    with pytest.raises(NonFinite):
        observer.check_finite()


def test_constructor_when_dynamic_with_memory_then_refuses():
    with pytest.raises(ConfigError, match="averaging_constant=1"):
        MovingAverageMinMaxObserver(is_dynamic=True)

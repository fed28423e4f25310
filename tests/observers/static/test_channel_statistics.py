import copy

import pytest
import torch

from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.static.channel_statistics import MAX_BLOCKS, ChannelStatisticsObserver
from pt2e_quant.observers.static.predicted_range import PredictedRangeObserver


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(2, 3), (2, 5, 3)])
def test_qparams_when_observed_then_equal_those_of_the_predicted_range(shape):
    channels, whole = ChannelStatisticsObserver(), PredictedRangeObserver()
    for seed in range(3):
        x = values(*shape, seed=seed) * (seed + 1)
        assert channels(x) is x
        whole(x)
    assert channels.margin == whole.margin
    assert (channels.margin > 1) == (len(shape) == 2)
    assert channels.steps == whole.steps
    for mine, other in zip(channels.calculate_qparams(), whole.calculate_qparams(), strict=True):
        assert torch.equal(mine, other)


def test_statistics_when_samples_come_one_by_one_then_one_block_each():
    x = values(6, 5, 3)
    observer = ChannelStatisticsObserver()
    for sample in x:
        observer(sample[None])
    found = observer.statistics()
    assert torch.equal(found.low, x.amin(1))
    assert torch.equal(found.high, x.amax(1))
    torch.testing.assert_close(found.mean_square, x.square().mean((0, 1)), rtol=1e-6, atol=0)
    assert found.rows_per_block == 5
    assert torch.equal(found.absmax, x.abs().amax((0, 1)))


@pytest.mark.parametrize("calls", [1, 2 * MAX_BLOCKS + 3])
def test_statistics_when_many_rows_then_blocks_merge_and_nothing_is_lost(calls):
    rows = MAX_BLOCKS * 3 + 1
    observer = ChannelStatisticsObserver()
    x = values(calls, rows, 4)
    for call in x:
        observer(call)
    found = observer.statistics()
    assert MAX_BLOCKS // 2 <= found.low.shape[0] <= MAX_BLOCKS
    assert torch.equal(found.low.amin(0), x.amin((0, 1)))
    assert torch.equal(found.high.amax(0), x.amax((0, 1)))
    assert found.rows_per_block * found.low.shape[0] == pytest.approx(calls * rows)


def test_statistics_when_widths_differ_then_none_but_the_range_is_whole():
    observer = ChannelStatisticsObserver()
    observer(torch.tensor([[1.0, -2.0, 3.0]]))
    observer(torch.tensor([[5.0, -7.0]]))
    assert observer.statistics() is None
    scale, _ = observer.calculate_qparams()
    assert scale.item() == pytest.approx(12 / 255)
    assert ChannelStatisticsObserver().statistics() is None


def test_scale_channels_when_scaled_then_equals_observing_the_scaled_tensor():
    x, factors = values(4, 6, 3), torch.tensor([0.5, 2.0, 0.125])
    before, after = ChannelStatisticsObserver(), ChannelStatisticsObserver()
    before(x)
    before.scale_channels(factors, "halved")
    after(x * factors)
    assert torch.equal(before.statistics().low, after.statistics().low)
    assert torch.equal(before.calculate_qparams()[0], after.calculate_qparams()[0])
    torch.testing.assert_close(before.statistics().mean_square, after.statistics().mean_square)
    assert before.scalings == ["halved"]
    assert before.steps[0] == "halved"


def test_check_finite_when_nan_or_inf_came_in_then_raises():
    for bad in (torch.nan, torch.inf, -torch.inf):
        observer = ChannelStatisticsObserver()
        observer(values(1, 4, 3))
        observer.check_finite()
        x = values(1, 4, 3)
        x[0, 2, 1] = bad
        observer(x)
        with pytest.raises(NonFinite):
            observer.check_finite()


def test_observer_when_half_precision_copied_reset_or_saved_then_still_right():
    x = values(2, 4, 3).to(torch.bfloat16)
    observer = ChannelStatisticsObserver()
    observer(x)
    twin = copy.deepcopy(observer)
    assert torch.equal(twin.statistics().high, x.float().amax(1))
    loaded = ChannelStatisticsObserver()
    loaded.load_state_dict(observer.state_dict())
    assert torch.equal(loaded.calculate_qparams()[0], observer.calculate_qparams()[0])
    observer.reset_min_max_vals()
    assert not observer.seen
    observer(torch.ones(1, 2, 5))
    assert observer.statistics().low.shape == (1, 5)


def test_observer_when_part_is_masked_then_left_out_of_the_range():
    observer = ChannelStatisticsObserver()
    observer.ignore_at_or_below = -1e4
    observer(torch.tensor([[-1e30, 1.0, -2.0]]))
    assert (observer.min_val.item(), observer.max_val.item()) == (-2.0, 1.0)
    assert observer.statistics() is None

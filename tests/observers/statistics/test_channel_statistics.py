import copy

import pytest
import torch

from pt2e_quant.observers.statistics.channel_statistics import MAX_BLOCKS, ChannelStatistics


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_statistics_when_samples_come_one_by_one_then_one_block_each():
    x = values(6, 5, 3)
    found = ChannelStatistics()
    for sample in x:
        assert found(sample[None]).data_ptr() == sample.data_ptr()
    assert torch.equal(found.low, x.amin(1))
    assert torch.equal(found.high, x.amax(1))
    torch.testing.assert_close(found.mean_square, x.square().mean((0, 1)), rtol=1e-6, atol=0)
    assert found.rows_per_block == 5
    assert torch.equal(found.absmax, x.abs().amax((0, 1)))


@pytest.mark.parametrize("calls", [1, 2 * MAX_BLOCKS + 3])
def test_statistics_when_many_rows_then_blocks_merge_and_nothing_is_lost(calls):
    rows = MAX_BLOCKS * 3 + 1
    found = ChannelStatistics()
    x = values(calls, rows, 4)
    for call in x:
        found(call)
    assert MAX_BLOCKS // 2 <= found.low.shape[0] <= MAX_BLOCKS
    assert torch.equal(found.low.amin(0), x.amin((0, 1)))
    assert torch.equal(found.high.amax(0), x.amax((0, 1)))
    assert found.rows_per_block * found.low.shape[0] == pytest.approx(calls * rows)


def test_statistics_when_widths_differ_or_nothing_came_then_unseen():
    found = ChannelStatistics()
    assert not found.seen
    found(torch.tensor([[1.0, -2.0, 3.0]]))
    assert found.seen
    found(torch.tensor([[5.0, -7.0]]))
    assert not found.seen


def test_scaled_when_channels_are_multiplied_then_equals_those_of_the_product():
    x, factors = values(4, 6, 3), torch.tensor([0.5, 2.0, 0.125])
    before, after = ChannelStatistics(), ChannelStatistics()
    before(x)
    after(x * factors)
    made = before.scaled(factors)
    assert torch.equal(made.low, after.low)
    assert torch.equal(before.low, x.amin(1))
    torch.testing.assert_close(made.mean_square, after.mean_square)
    assert made.rows_per_block == after.rows_per_block


def test_statistics_when_half_precision_then_float32_also_in_a_copy():
    x = values(2, 4, 3).to(torch.bfloat16)
    found = ChannelStatistics()
    found(x)
    assert torch.equal(copy.deepcopy(found).high, x.float().amax(1))

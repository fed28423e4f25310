import pytest
import torch

from pt2e_quant.core.errors import Pt2eQuantWarning
from pt2e_quant.observers.channel_minmax import ChannelMinMaxObserver
from pt2e_quant.observers.minmax import MinMaxObserver


def test_qparams_when_observed_then_equal_those_of_min_max():
    channels, whole = ChannelMinMaxObserver(), MinMaxObserver()
    generator = torch.Generator().manual_seed(0)
    for scale in (1.0, 4.0):
        x = torch.randn(2, 5, 3, generator=generator) * scale
        assert channels(x) is x
        whole(x)
    assert channels.min_val.shape == (3,)
    for mine, other in zip(channels.calculate_qparams(), whole.calculate_qparams(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_channels_when_axis_is_given_then_kept_along_it(axis):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0))
    observer = ChannelMinMaxObserver(ch_axis=axis)
    observer(x)
    rows = x.movedim(axis, 0).flatten(1)
    assert torch.equal(observer.min_val, rows.amin(1))
    assert torch.equal(observer.absmax, rows.abs().amax(1))


def test_scale_channels_when_smoothed_then_equals_observing_the_smoothed_tensor():
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    factors = torch.tensor([0.5, 2.0, 0.125])
    before, after = ChannelMinMaxObserver(), ChannelMinMaxObserver()
    before(x)
    before.scale_channels(factors)
    after(x * factors)
    assert torch.equal(before.min_val, after.min_val)
    assert torch.equal(before.max_val, after.max_val)


def test_state_when_loaded_then_shapes_follow():
    observer, other = ChannelMinMaxObserver(), ChannelMinMaxObserver()
    observer(torch.ones(2, 3))
    other.load_state_dict(observer.state_dict())
    assert torch.equal(other.max_val, torch.ones(3))


def test_qparams_when_unseen_then_warns():
    with pytest.warns(Pt2eQuantWarning, match="saw no data"):
        assert ChannelMinMaxObserver().calculate_qparams()[0].tolist() == [1.0]

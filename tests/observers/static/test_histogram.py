import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.ao.quantization import observer as upstream

from pt2e_quant.core.errors import ConfigError, UnsupportedError
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.static.histogram import HistogramObserver

SHAPES_OF_DATA = {
    "normal": lambda x: x,
    "relu": torch.relu,
    "cubed": lambda x: x**3,
    "sigmoid": torch.sigmoid,
    "shifted": lambda x: x + 3,
    "heavy_tail": lambda x: x / x.roll(1).abs().clamp(min=1e-4),
    "constant": lambda x: torch.full_like(x, 2.5),
    "few_values": lambda x: x.round(),
}
ARGUMENTS = [
    {},
    {"dtype": torch.int8, "qscheme": torch.per_tensor_symmetric},
    {"dtype": torch.uint8, "quant_min": 0, "quant_max": 127, "bins": 300},
    {"dtype": torch.int16},
]


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    kinds=st.lists(st.sampled_from(sorted(SHAPES_OF_DATA)), min_size=1, max_size=4),
    arguments=st.sampled_from(ARGUMENTS),
)
def test_histogram_when_given_batches_then_equals_torch_ao(seed, kinds, arguments):
    ours, theirs = HistogramObserver(**arguments), upstream.HistogramObserver(**arguments)
    generator = torch.Generator().manual_seed(seed)
    for kind in kinds:
        size = int(torch.randint(1, 1500, (1,), generator=generator))
        gain = float(torch.rand(1, generator=generator)) * 4 + 0.1
        x = SHAPES_OF_DATA[kind](torch.randn(size, generator=generator)) * gain
        assert ours(x) is x
        theirs(x)
    assert torch.equal(ours.histogram, theirs.histogram)
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine.to(other.dtype), other)
    assert set(ours.state_dict()) == set(theirs.state_dict())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_forward_when_a_value_is_not_finite_then_raises_and_keeps_its_statistics(bad):
    observer = HistogramObserver()
    observer(torch.ones(3))
    with pytest.raises(NonFinite):
        observer(torch.tensor([0.0, bad]))
    observer.check_finite()
    assert observer.histogram.sum() == 3


def test_forward_when_entries_are_masked_then_they_do_not_count():
    observer, clean = HistogramObserver(), HistogramObserver()
    observer.ignore_at_or_below = torch.finfo(torch.float32).min / 2
    x = torch.randn(100, generator=torch.Generator().manual_seed(0))
    masked = torch.full((50,), torch.finfo(torch.float32).min)
    observer(masked)
    assert not observer.seen
    observer(torch.cat([x, masked, torch.tensor([-torch.inf])]))
    clean(x)
    assert torch.equal(observer.histogram, clean.histogram)
    with pytest.raises(NonFinite):
        observer(torch.tensor([torch.nan]))


@pytest.mark.parametrize("value", [0.0, 1e30, -1e-3])
def test_forward_when_one_element_then_the_range_holds_it(value):
    observer = HistogramObserver(dtype=torch.int8)
    observer(torch.tensor(value))
    observer(torch.empty(0))
    assert observer.histogram.sum() == 1
    scale, zero_point = observer.calculate_qparams()
    assert (127 - zero_point) * scale >= value * 0.999
    assert (-128 - zero_point) * scale <= value * 0.999


def test_state_when_loaded_then_goes_on_as_before():
    generator = torch.Generator().manual_seed(0)
    observer, other = HistogramObserver(), HistogramObserver()
    observer(torch.randn(50, generator=generator))
    other.load_state_dict(observer.state_dict())
    x = torch.randn(50, generator=generator) * 3
    observer(x)
    other(x)
    assert torch.equal(observer.histogram, other.histogram)
    observer.reset_min_max_vals()
    assert not observer.seen
    assert other.seen


def test_constructor_when_it_cannot_gather_that_then_refuses():
    with pytest.raises(ConfigError, match="cannot be dynamic"):
        HistogramObserver(is_dynamic=True)
    with pytest.raises(ConfigError, match="has no qscheme"):
        HistogramObserver(qscheme=torch.per_channel_affine)
    with pytest.raises(UnsupportedError, match="floating-point"):
        HistogramObserver()(torch.arange(3))

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.flow.convert.joint_qparams import (
    is_min_max,
    joint_qparams,
    qparams_by_observer,
    range_of,
)
from pt2e_quant.observers.static.histogram import HistogramObserver
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver
from pt2e_quant.observers.static.moving_average import MovingAverageMinMaxObserver
from pt2e_quant.observers.training.trained_qparams import qparams_of

PER_TENSOR = (torch.per_tensor_affine, torch.per_tensor_symmetric)
PER_CHANNEL = (torch.per_channel_affine, torch.per_channel_symmetric)
RANGES = ((torch.int8, -128, 127), (torch.int8, -127, 127), (torch.uint8, 0, 255))


def tensors(seed, count):
    generator = torch.Generator().manual_seed(seed)
    magnitudes = 10 ** (torch.rand(count, generator=generator) * 16 - 8)
    return [torch.randn(3, 4, generator=generator) * m for m in magnitudes]


def same(found, expected):
    assert torch.equal(found.scale, expected.scale)
    assert torch.equal(found.zero_point, expected.zero_point)
    fields = ("quant_min", "quant_max", "dtype", "axis", "group_size")
    assert all(getattr(found, f) == getattr(expected, f) for f in fields)


@settings(max_examples=25)
@given(st.integers(0, 10_000), st.integers(1, 6), st.sampled_from(RANGES), st.data())
def test_qparams_when_computed_jointly_then_equal_to_each_alone(seed, count, limits, data):
    dtype, low, high = limits
    is_channel = data.draw(st.booleans())
    qscheme = data.draw(st.sampled_from(PER_CHANNEL if is_channel else PER_TENSOR))
    kind = PerChannelMinMaxObserver if is_channel else MinMaxObserver
    extra = {"ch_axis": data.draw(st.integers(0, 1))} if is_channel else {}
    observers = [
        kind(dtype=dtype, qscheme=qscheme, quant_min=low, quant_max=high, **extra)
        for _ in range(count)
    ]
    values = tensors(seed, count)
    for observer, value in zip(observers, values, strict=True):
        observer(value)
    expected = [qparams_of(observer) for observer in observers]
    by_id = qparams_by_observer(observers)
    ranges = [range_of(observers[0], value) for value in values]
    for at, (observer, alone) in enumerate(zip(observers, expected, strict=True)):
        same(by_id[id(observer)], alone)
        same(joint_qparams(observers[0], ranges)[at], alone)


def test_qparams_when_observers_differ_in_settings_then_not_mixed():
    wide, narrow = (
        MinMaxObserver(dtype=torch.int8),
        MinMaxObserver(dtype=torch.int8, quant_min=-8, quant_max=7),
    )
    for observer in (wide, narrow):
        observer(torch.tensor([-1.0, 1.0]))
    found = qparams_by_observer([wide, narrow])
    same(found[id(wide)], qparams_of(wide))
    same(found[id(narrow)], qparams_of(narrow))


def test_qparams_when_computed_jointly_then_each_has_its_own_storage():
    observers = [MinMaxObserver(dtype=torch.int8) for _ in range(3)]
    for observer in observers:
        observer(torch.tensor([-1.0, 2.0]))
    found = qparams_by_observer(observers).values()
    assert len({q.scale.untyped_storage().data_ptr() for q in found}) == 3


@pytest.mark.parametrize(
    "observer",
    [
        HistogramObserver(dtype=torch.int8),
        MovingAverageMinMaxObserver(dtype=torch.int8),
        MinMaxObserver(dtype=torch.int8, factory_kwargs={"dtype": torch.float16}),
        PerChannelMinMaxObserver(
            dtype=torch.quint8, qscheme=torch.per_channel_affine_float_qparams
        ),
    ],
)
def test_qparams_when_the_observer_is_not_min_max_then_left_alone(observer):
    observer(torch.tensor([[-1.0, 2.0]]))
    assert not is_min_max(observer)
    assert qparams_by_observer([observer]) == {}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_qparams_when_a_range_is_invalid_then_left_to_the_observer(value):
    observer = MinMaxObserver(dtype=torch.int8)
    assert joint_qparams(observer, [range_of(observer, torch.tensor([1.0, value]))]) is None
    unseen = MinMaxObserver(dtype=torch.int8)
    assert qparams_by_observer([unseen]) == {}


def test_range_when_the_constant_is_empty_then_there_is_none():
    assert range_of(MinMaxObserver(dtype=torch.int8), torch.empty(0, 4)) is None

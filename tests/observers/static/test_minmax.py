import pytest
import torch
from torch.ao.quantization import observer as upstream

from pt2e_quant.core.errors import ConfigError, InputError, Pt2eQuantWarning, UnsupportedError
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.static.minmax import MinMaxObserver, PerChannelMinMaxObserver

SYMMETRIC = {"qscheme": torch.per_tensor_symmetric}
NARROW = {"quant_min": -127, "quant_max": 127, "eps": 2**-12}
TENSOR_ARGUMENTS = [
    {},
    {"dtype": torch.int8},
    {"dtype": torch.uint8, "quant_min": 0, "quant_max": 127},
    {"dtype": torch.uint8, **SYMMETRIC},
    {"dtype": torch.uint8, "quant_min": 0, "quant_max": 255, **SYMMETRIC},
    {"dtype": torch.int8, **SYMMETRIC, **NARROW},
    {"dtype": torch.int16, **SYMMETRIC},
    {"dtype": torch.uint16, **SYMMETRIC},
    {"dtype": torch.int32, "quant_min": 0, "quant_max": 65535},
]
CHANNEL_ARGUMENTS = [
    {"ch_axis": 1},
    {"ch_axis": -1, "dtype": torch.int8},
    {"dtype": torch.int8, "qscheme": torch.per_channel_symmetric, **NARROW},
    {"qscheme": torch.per_channel_affine_float_qparams},
]


def batches(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(3, 4, 5, generator=generator) * scale for scale in (1.0, 7.0, 0.1)]


def assert_same_qparams(ours, theirs):
    for mine, other in zip(ours.calculate_qparams(), theirs.calculate_qparams(), strict=True):
        assert torch.equal(mine.to(other.dtype), other)
    assert list(ours.state_dict()) == list(theirs.state_dict())


@pytest.mark.parametrize("arguments", TENSOR_ARGUMENTS)
def test_min_max_when_given_batches_then_equals_torch_ao(arguments):
    ours, theirs = MinMaxObserver(**arguments), upstream.MinMaxObserver(**arguments)
    for x in batches():
        assert ours(x) is x
        theirs(x)
    assert_same_qparams(ours, theirs)


@pytest.mark.parametrize("arguments", CHANNEL_ARGUMENTS)
def test_per_channel_when_given_batches_then_equals_torch_ao(arguments):
    ours = PerChannelMinMaxObserver(**arguments)
    theirs = upstream.PerChannelMinMaxObserver(**arguments)
    for x in batches():
        ours(x)
        theirs(x)
    assert_same_qparams(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("make", [MinMaxObserver, PerChannelMinMaxObserver])
def test_forward_when_other_float_dtype_then_range_is_that_of_the_values(make, dtype):
    x = batches()[0].to(dtype)
    observer, wide = make(), make()
    observer(x)
    wide(x.float())
    assert torch.equal(observer.min_val, wide.min_val)
    assert observer.max_val.dtype == torch.float32


@pytest.mark.parametrize("make", [MinMaxObserver, PerChannelMinMaxObserver])
def test_forward_when_batch_is_empty_then_nothing_changes(make):
    observer = make()
    observer(torch.empty(3, 0))
    assert not observer.seen
    with pytest.warns(Pt2eQuantWarning, match="saw no data"):
        scale, zero_point = observer.calculate_qparams()
    assert scale.tolist() == [1.0]
    assert zero_point.tolist() == [0]
    observer(torch.ones(3, 2))
    assert observer.seen


@pytest.mark.parametrize("value", [0.0, 5.0, -5.0])
def test_qparams_when_tensor_is_constant_then_value_is_representable(value):
    observer = MinMaxObserver(dtype=torch.int8)
    observer(torch.tensor(value))
    scale, zero_point = observer.calculate_qparams()
    q = round(value / scale.item()) + zero_point.item()
    assert -128 <= q <= 127
    assert (q - zero_point.item()) * scale.item() == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_check_finite_when_a_value_is_not_then_raises(bad):
    observer = MinMaxObserver()
    observer.check_finite()
    observer(torch.tensor([1.0, bad]))
    observer(torch.tensor([1.0, 2.0]))
    with pytest.raises(NonFinite, match="NaN or infinity"):
        observer.check_finite()
    with pytest.raises(NonFinite):
        observer.calculate_qparams()


def test_check_finite_when_one_channel_is_not_then_names_it():
    observer = PerChannelMinMaxObserver()
    observer.check_finite()
    observer(torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]))
    with pytest.raises(NonFinite, match="channel 1"):
        observer.check_finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_ignore_when_entries_are_masked_then_they_do_not_count(dtype):
    limit = torch.finfo(dtype).min
    observer = MinMaxObserver()
    observer.ignore_at_or_below = limit / 2
    observer(torch.tensor([limit, -torch.inf], dtype=dtype))
    assert not observer.seen
    observer(torch.tensor([limit, 1.0, -torch.inf, -2.0], dtype=dtype))
    assert (observer.min_val, observer.max_val) == (-2.0, 1.0)
    observer(torch.tensor([limit, torch.nan], dtype=dtype))
    with pytest.raises(NonFinite):
        observer.check_finite()


def test_ignore_when_per_channel_then_masked_entries_do_not_count():
    limit = torch.finfo(torch.float32).min
    observer = PerChannelMinMaxObserver(ch_axis=1)
    observer.ignore_at_or_below = limit / 2
    observer(torch.tensor([[limit, 1.0], [-3.0, limit]]))
    assert observer.min_val.tolist() == [-3.0, 1.0]
    assert observer.max_val.tolist() == [-3.0, 1.0]


@pytest.mark.parametrize("make", [MinMaxObserver, PerChannelMinMaxObserver])
def test_forward_when_tensor_is_integer_then_refuses(make):
    for x in (torch.arange(3), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(UnsupportedError, match="floating-point"):
            make()(x)


def test_forward_when_constant_then_observed_once():
    observer = MinMaxObserver()
    observer.observes_constant = True
    observer(torch.tensor([1.0]))
    observer(torch.tensor([9.0]))
    assert observer.max_val == 1.0
    observer.reset_min_max_vals()
    observer(torch.tensor([9.0]))
    assert observer.max_val == 9.0


@pytest.mark.parametrize("make", [MinMaxObserver, PerChannelMinMaxObserver])
def test_statistics_when_input_changes_later_then_they_do_not(make):
    x = torch.ones(1, 1, requires_grad=True)
    observer = make()
    observer(x)
    with torch.no_grad():
        x.fill_(100.0)
    assert observer.max_val.reshape(-1).tolist() == [1.0]
    assert not observer.max_val.requires_grad


def test_per_channel_when_state_is_loaded_then_shapes_follow():
    observer, other = PerChannelMinMaxObserver(), PerChannelMinMaxObserver()
    observer(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    other.load_state_dict(observer.state_dict())
    assert torch.equal(other.min_val, observer.min_val)
    assert other.min_val.data_ptr() != observer.min_val.data_ptr()


def test_per_channel_when_number_of_channels_changes_then_refuses():
    observer = PerChannelMinMaxObserver()
    observer(torch.ones(4, 3))
    with pytest.raises(InputError, match="4 channels was given 5"):
        observer(torch.ones(5, 3))
    with pytest.raises(ConfigError, match="ch_axis 2 is out of range"):
        PerChannelMinMaxObserver(ch_axis=2)(torch.ones(4, 3))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quant_min": 5, "quant_max": 3}, "must be a range"),
        ({"dtype": torch.int8, "quant_min": 0, "quant_max": 255}, "does not fit"),
        ({"qscheme": torch.per_channel_affine}, "has no qscheme"),
    ],
)
def test_constructor_when_arguments_contradict_then_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        MinMaxObserver(**arguments)


def test_reduce_range_when_asked_then_halves_and_warns():
    with pytest.warns(Pt2eQuantWarning, match="deprecated"):
        observer = MinMaxObserver(dtype=torch.int8, reduce_range=True)
    assert (observer.quant_min, observer.quant_max) == (-64, 63)


def test_with_args_when_called_then_makes_a_new_observer_each_time():
    make = MinMaxObserver.with_args(dtype=torch.int8).with_args(eps=2**-12)
    first, second = make(), make(dtype=torch.uint8)
    assert first is not second
    assert (first.dtype, second.dtype) == (torch.int8, torch.uint8)
    assert first.eps.item() == 2**-12
    counter = iter(range(9))
    lazy = MinMaxObserver.with_callable_args(quant_max=lambda: 100 + next(counter), quant_min=int)
    assert (lazy().quant_max, lazy().quant_max, lazy(quant_max=7).quant_max) == (100, 101, 7)

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import ConfigError
from pt2e_quant.core.qparams import QParams, fake_quantize
from pt2e_quant.observers.base import NonFinite
from pt2e_quant.observers.static.minmax import MinMaxObserver
from pt2e_quant.observers.static.mse import MSEObserver, grid_over, squared_errors

KINDS = {
    "normal": lambda x: x,
    "relu": torch.relu,
    "cubed": lambda x: x**3,
    "gelu": torch.nn.functional.gelu,
    "relu6": lambda x: (3 * x).clamp(0, 6),
    "padded": lambda x: torch.where(torch.arange(x.numel()) % 3 == 0, 0.0, x),
    "negative": lambda x: -x.abs() - 1,
    "heavy_tail": lambda x: x / x.roll(1).abs().sqrt().clamp(min=1e-3),
    "constant": lambda x: torch.full_like(x, -2.5),
}
SCHEMES = [
    {"dtype": torch.int8},
    {
        "dtype": torch.int8,
        "qscheme": torch.per_tensor_symmetric,
        "quant_min": -127,
        "quant_max": 127,
    },
    {"dtype": torch.uint8},
    {"dtype": torch.uint8, "quant_min": 0, "quant_max": 15},
    {"dtype": torch.int16},
]


def normal(size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def true_error(observer, x):
    scale, zero_point = observer.calculate_qparams()
    qp = QParams(
        scale=scale,
        zero_point=zero_point,
        quant_min=observer.quant_min,
        quant_max=observer.quant_max,
        dtype=observer.dtype,
    )
    return float((fake_quantize(x, qp) - x).double().square().mean())


@settings(max_examples=60)
@given(
    low=st.floats(-1e30, 1e30),
    span=st.floats(0, 1e30),
    bins=st.integers(2, 4096),
)
@example(low=-4.3176871329048407e-308, span=2.0**53, bins=2)
def test_grid_when_over_any_range_then_covers_it_with_little_to_spare(low, span, bins):
    high = low + span
    grid = grid_over(low, high, bins)
    assert grid.holds(low, high, bins)
    # Fractions: a float's quotient may underflow to 0, which lies in another bin.
    finer = Fraction(2) ** (grid.exponent - 1)
    first, last = math.floor(Fraction(low) / finer), math.floor(Fraction(high) / finer)
    limited = grid.width <= max(abs(low), abs(high)) * 2**-20 or grid.exponent == -64
    assert last - first + 1 > bins or limited


@settings(max_examples=40)
@given(
    batches=st.lists(
        st.tuples(st.integers(-3000, 3000), st.integers(0, 12)), min_size=1, max_size=6
    ),
    bins=st.integers(2, 300),
)
def test_histogram_when_range_grows_then_counts_are_those_of_the_final_grid(batches, bins):
    observer = MSEObserver(bins=bins)
    data = []
    for shift, octave in batches:
        # Sixteenths: the subtraction that finds a bin is then exact.
        x = (normal(50, seed=shift & 255) * 2.0**octave * 16).round() / 16 + shift / 16
        observer(x)
        data.append(x)
    grid = observer.grid
    places = torch.floor(torch.cat(data).double() / grid.width).long() - grid.offset
    assert torch.equal(observer.histogram, torch.bincount(places, minlength=bins))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(sorted(KINDS)),
    scheme=st.sampled_from(SCHEMES),
    gain=st.floats(1e-3, 1e3),
)
def test_qparams_when_searched_then_not_worse_than_min_max(seed, kind, scheme, gain):
    observer, plain = MSEObserver(**scheme), MinMaxObserver(**scheme)
    for part in (0, 1):
        x = KINDS[kind](normal(3000, seed + part)) * gain
        assert observer(x) is x
        plain(x)
    if observer.min_val == observer.max_val:
        return
    data = observer.binned_data()
    found, whole = (
        squared_errors(data, *o.calculate_qparams(), observer.quant_min, observer.quant_max)
        for o in (observer, plain)
    )
    assert found <= whole


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"constant"}))
@pytest.mark.parametrize("scheme", SCHEMES[:4])
def test_qparams_when_searched_then_near_the_best_of_many_ranges(kind, scheme):
    x = KINDS[kind](normal(20_000))
    observer = MSEObserver(**scheme)
    observer(x)
    found = true_error(observer, x)
    shares = torch.arange(1, 21) / 20
    tried = []
    for low in shares if not observer.is_symmetric else shares[-1:]:
        for high in shares:
            clipped = MinMaxObserver(**scheme)
            clipped.min_val.copy_(observer.min_val * (high if observer.is_symmetric else low))
            clipped.max_val.copy_(observer.max_val.clamp(min=0) * high)
            tried.append(true_error(clipped, x))
    assert found <= min(tried) * 1.05


def test_squared_errors_when_bins_are_fine_then_equal_the_measured_error():
    x = normal(200_000)
    observer = MSEObserver(bins=4096, dtype=torch.int8)
    observer(x)
    for share in (1.0, 0.5, 0.2):
        clipped = MinMaxObserver(dtype=torch.int8)
        clipped.min_val.copy_(observer.min_val * share)
        clipped.max_val.copy_(observer.max_val * share)
        modelled = squared_errors(
            observer.binned_data(), *clipped.calculate_qparams(), -128, 127
        ).item()
        assert modelled / x.numel() == pytest.approx(true_error(clipped, x), rel=0.01)


def test_zero_count_when_zeros_stand_out_then_they_cost_nothing():
    x = normal(10_000).relu()
    observer = MSEObserver(dtype=torch.uint8)
    observer(x)
    assert observer.zero_count == (x == 0).sum()
    assert observer.binned_data().counts.sum() == (x > 0).sum()
    spread = MSEObserver(dtype=torch.uint8)
    spread(normal(10_000))
    assert spread.zero_count == 0


@pytest.mark.parametrize("value", [0.0, 3.0, -1e-20, 1e30])
def test_qparams_when_constant_then_equal_those_of_min_max(value):
    observer, plain = MSEObserver(dtype=torch.int8), MinMaxObserver(dtype=torch.int8)
    for o in (observer, plain):
        o(torch.tensor(value))
        o(torch.empty(2, 0))
    assert observer.histogram.sum() == 1
    for mine, other in zip(observer.calculate_qparams(), plain.calculate_qparams(), strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_forward_when_a_value_is_not_finite_then_raises(bad):
    observer = MSEObserver()
    with pytest.raises(NonFinite):
        observer(torch.tensor([0.0, bad]))
    assert not observer.seen


def test_forward_when_entries_are_masked_then_they_do_not_count():
    observer = MSEObserver()
    observer.ignore_at_or_below = torch.finfo(torch.float32).min / 2
    observer(torch.tensor([torch.finfo(torch.float32).min, 1.0, -torch.inf, 2.0]))
    assert observer.histogram.sum() == 2
    assert observer.min_val == 1.0


def test_state_when_loaded_then_goes_on_as_before():
    observer, other = MSEObserver(), MSEObserver()
    observer(normal(100))
    other.load_state_dict(observer.state_dict())
    for o in (observer, other):
        o(normal(100, 1) * 9)
    assert torch.equal(observer.histogram, other.histogram)
    assert observer.grid == other.grid
    other.reset_min_max_vals()
    assert not other.seen
    assert observer.seen


def test_constructor_when_bins_are_too_few_then_refuses():
    with pytest.raises(ConfigError, match="at least 2 bins"):
        MSEObserver(bins=1)

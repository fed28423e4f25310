import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.core.errors import CalibrationError, ConfigError
from pt2e_quant.core.qparams import (
    QParams,
    choose_qparams,
    dequantize,
    fake_quantize,
    quantize,
)
from pt2e_quant.observers.static.minmax import PerChannelMinMaxObserver
from pt2e_quant.observers.training.trained_qparams import qparams_of
from pt2e_quant.observers.weights import weight_search
from pt2e_quant.observers.weights.weight import WeightObserver
from pt2e_quant.observers.weights.weight_search import WeightSearch, search_qparams

SYMMETRIC, AFFINE = torch.per_channel_symmetric, torch.per_channel_affine


def normal(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def limits_of(bits, symmetric):
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if symmetric else (0, (1 << bits) - 1)


def error_of(rows, search, bits, symmetric, norm=2.0):
    low, high = limits_of(bits, symmetric)
    found = search_qparams(rows, search, quant_min=low, quant_max=high, symmetric=symmetric)
    return error_under(rows, *found, bits, symmetric, norm)


def error_under(rows, scale, zero, bits, symmetric, norm=2.0):
    low, high = limits_of(bits, symmetric)
    dtype = torch.int8 if symmetric else torch.uint8
    qp = QParams(scale=scale, zero_point=zero, quant_min=low, quant_max=high, dtype=dtype, axis=0)
    return (fake_quantize(rows, qp) - rows).abs().pow(norm).sum(1)


@settings(max_examples=60)
@given(
    bits=st.integers(2, 8),
    symmetric=st.booleans(),
    seed=st.integers(0, 1000),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 70)),
    offset=st.floats(-3, 3),
)
def test_searches_when_compared_then_each_is_best_by_its_own_measure(
    bits, symmetric, seed, shape, offset
):
    rows = normal(shape, seed) + offset
    whole = error_of(rows, WeightSearch.MIN_MAX, bits, symmetric)
    least = error_of(rows, WeightSearch.MSE, bits, symmetric)
    assert bool((least <= whole * (1 + 1e-5) + 1e-9).all())
    whole = error_of(rows, WeightSearch.MIN_MAX, bits, symmetric, norm=0.7)
    least = error_of(rows, WeightSearch.HQQ, bits, symmetric, norm=0.7)
    assert bool((least <= whole * (1 + 1e-3) + 1e-3).all())


def over_steps(rows, bits):
    """The range over the number of steps, as observers of torch.ao have it."""
    low, high = limits_of(bits, True)
    ends = rows.amin(1), rows.amax(1)
    return choose_qparams(*ends, quant_min=low, quant_max=high, symmetric=True)


def test_mse_when_weights_are_normal_then_gains_on_the_range_at_4_bits():
    rows = normal((256, 128), 0)
    whole = error_under(rows, *over_steps(rows, 4), 4, True).sum()
    assert whole / error_of(rows, WeightSearch.MSE, 4, True).sum() > 1.15  # 0.6 dB


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("length", [32, 128, 1536])
def test_min_max_when_symmetric_then_is_nearer_than_the_range_over_the_steps(bits, length):
    for seed, draw in enumerate((torch.randn, torch.rand)):
        rows = draw(256, length, generator=torch.Generator().manual_seed(seed))
        rows = rows if draw is torch.randn else 2 * rows - 1
        whole = error_under(rows, *over_steps(rows, bits), bits, True).sum()
        assert error_of(rows, WeightSearch.MIN_MAX, bits, True).sum() <= 1.001 * whole


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_min_max_when_symmetric_then_nothing_is_off_by_more_than_half_a_step(bits):
    rows, (low, high) = normal((64, 48), bits), limits_of(bits, True)
    scale, zero = search_qparams(
        rows, WeightSearch.MIN_MAX, quant_min=low, quant_max=high, symmetric=True
    )
    codes = (rows / scale[:, None]).round().clamp(low, high)
    off = (codes * scale[:, None] - rows).abs() / scale[:, None]
    assert off.max() <= 0.5 * (1 + 1e-5)
    assert bool((scale <= over_steps(rows, bits)[0] * (1 + 1e-6)).all())
    assert not zero.any()


@pytest.mark.parametrize("search", WeightSearch)
def test_search_when_rows_are_constant_or_zero_then_finite_and_exact_at_zero(search):
    rows = torch.stack([torch.zeros(16), torch.full((16,), 2.0), torch.full((16,), -1e-30)])
    scale, zero = search_qparams(rows, search, quant_min=-8, quant_max=7, symmetric=True)
    assert bool(torch.isfinite(scale).all())
    assert bool((scale > 0).all())
    assert bool((zero == 0).all())


def test_min_max_when_affine_then_equals_choose_qparams():
    rows = normal((7, 33), 3)
    how = {"quant_min": 0, "quant_max": 15, "symmetric": False}
    found = search_qparams(rows, WeightSearch.MIN_MAX, **how)
    known = choose_qparams(rows.amin(1), rows.amax(1), **how)
    assert torch.equal(found[0], known[0])
    assert torch.equal(found[1], known[1])


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_observer_when_per_channel_then_one_scale_each(axis):
    observer = WeightObserver(ch_axis=axis)
    x = normal((3, 4, 5), 1)
    assert observer(x) is x
    scale, zero = observer.calculate_qparams()
    others = [i for i in range(3) if i != axis]
    expected = torch.maximum(x.amin(others) / -128, x.amax(others) / 127)
    assert torch.allclose(scale, expected)
    assert zero.shape == scale.shape


@pytest.mark.parametrize("qscheme", [torch.per_channel_symmetric, torch.per_tensor_symmetric])
def test_observer_when_symmetric_in_all_of_int8_then_both_ends_are_exact(qscheme):
    x = torch.tensor([[-2.0, 1.0, 0.3], [-1.0, 4.0, 0.1], [0.5, 2.0, 0.1], [-3.0, -0.1, -0.7]])
    observer = WeightObserver(qscheme=qscheme)
    observer(x)
    found = qparams_of(observer)
    codes = quantize(x, found)
    if qscheme == torch.per_channel_symmetric:
        assert codes.amin(1).tolist() == [-128, -32, 6, -128]
        assert codes.amax(1).tolist() == [64, 127, 127, -4]
    real = dequantize(codes, found)
    step = found.scale.unsqueeze(1) if found.is_per_channel else found.scale
    assert bool(((real - x).abs() <= 0.5001 * step).all())  # nothing is clipped
    again = WeightObserver(qscheme=qscheme)
    again(real)
    assert torch.equal(quantize(real, qparams_of(again)), codes)


def test_observers_of_torch_when_symmetric_in_all_of_int8_then_they_keep_its_meaning():
    x = normal((6, 40), 4)
    observer = PerChannelMinMaxObserver(dtype=torch.int8, qscheme=SYMMETRIC)
    observer(x)
    scale, _ = observer.calculate_qparams()
    assert torch.equal(scale, x.abs().amax(1) / 127.5)


def test_observer_when_grouped_then_rows_by_groups_and_state_round_trips():
    observer = WeightObserver(torch.uint4, AFFINE, group_size=8, search=WeightSearch.MSE)
    observer(normal((6, 32), 2))
    scale, zero = observer.calculate_qparams()
    assert scale.shape == zero.shape == (6, 4)
    other = WeightObserver(torch.uint4, AFFINE, group_size=8, search=WeightSearch.MSE)
    other.load_state_dict(observer.state_dict())
    assert all(
        torch.equal(a, b) for a, b in zip(other.calculate_qparams(), (scale, zero), strict=True)
    )


def test_observer_when_groups_do_not_divide_then_refused():
    with pytest.raises(ConfigError, match="groups of 32 do not divide"):
        WeightObserver(group_size=32)(normal((4, 40), 0))


def test_observer_when_weight_is_not_finite_then_refused():
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        WeightObserver()(torch.tensor([[1.0, float("nan")], [1.0, 2.0]]))


@pytest.mark.parametrize("search", WeightSearch)
def test_search_when_torch_has_threads_then_runs_on_one(search, monkeypatch):
    # A barrier of threads behind each small operator costs milliseconds on a busy machine.
    seen = []
    find = weight_search._SEARCHES[search]

    def spy(*args):
        seen.append(torch.get_num_threads())
        return find(*args)

    monkeypatch.setitem(weight_search._SEARCHES, search, spy)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        search_qparams(normal((8, 8), 0), search, quant_min=-8, quant_max=7, symmetric=True)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert seen == [1]


def test_search_when_its_name_is_unknown_then_near_ones_are_offered():
    assert WeightSearch.named("hqq") is WeightSearch.HQQ
    with pytest.raises(ConfigError, match='did you mean "min_max"'):
        WeightSearch.named("minmax")

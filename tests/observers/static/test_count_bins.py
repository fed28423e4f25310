import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.observers.static.count_bins import (
    count_bins,
    count_multiples,
    count_zeros,
    flat_in_memory_order,
)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 4000),
    bins=st.integers(1, 4096),
    scale=st.floats(1e-6, 1e6),
    shift=st.floats(-100, 100),
    relu=st.booleans(),
)
def test_count_bins_when_values_are_any_then_equals_histc(seed, size, bins, scale, shift, relu):
    x = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale + shift
    x = x.relu() if relu else x
    low, high = x.min().item(), x.max().item()
    if low == high:
        high = low + 1.0
    counts = count_bins(x, bins, low, high)
    assert torch.equal(counts.float(), torch.histc(x, bins, low, high))
    assert counts.sum() == size


def test_count_bins_when_tensor_is_larger_than_a_piece_then_all_is_counted():
    x = torch.rand(600_001, generator=torch.Generator().manual_seed(0))
    assert torch.equal(count_bins(x, 64, 0.0, 1.0).float(), torch.histc(x, 64, 0.0, 1.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_count_bins_when_dtype_is_another_float_then_the_values_count(dtype):
    x = torch.randn(500, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, high = x.min().item(), x.max().item()
    assert torch.equal(count_bins(x, 32, low, high), count_bins(x.float(), 32, low, high))


def test_flat_when_dense_in_any_order_then_a_view():
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    for y in (x, x.to(memory_format=torch.channels_last), x.permute(3, 1, 0, 2), x[0, 0, 0, 0]):
        flat = flat_in_memory_order(y)
        assert flat.data_ptr() == y.data_ptr()
        assert torch.equal(flat.sort().values, y.reshape(-1).sort().values)
    part = x[:, ::2]
    assert torch.equal(flat_in_memory_order(part).sort().values, part.reshape(-1).sort().values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 1000, 600_001])
def test_count_zeros_when_some_are_then_equals_count_nonzero(size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0)).relu().neg().to(dtype)
    assert count_zeros(x) == size - torch.count_nonzero(x)
    assert count_zeros(torch.zeros(size, dtype=dtype)) == size


@settings(max_examples=60)
@given(
    places=st.lists(st.integers(0, 300 * 64 - 1), min_size=1, max_size=200),
    exponent=st.integers(-40, 40),
    first=st.integers(-(2**16), 2**16),
)
def test_count_multiples_when_values_are_exact_then_equals_floor(places, exponent, first):
    # 64ths of a bin: exact in float32 next to any first below 2**17.
    at = torch.tensor(places, dtype=torch.float64) / 64
    x = ((at + first) * 2.0**exponent).to(torch.float32)
    counts = count_multiples(x, 300, exponent, first)
    assert torch.equal(counts, torch.bincount(at.floor().long(), minlength=300))

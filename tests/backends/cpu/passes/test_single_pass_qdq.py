"""Quantizing in one pass: the integers of torch's quantized tensors, without a copy of them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pt2e_quant.backends.cpu.passes.single_pass_qdq import (
    FULL_RANGES,
    dequantize_once,
    hear_deprecation,
    quantize_once,
)
from pt2e_quant.core.qdq import DequantizePerTensor, QuantizePerTensor


@pytest.fixture(autouse=True)
def _heard():
    hear_deprecation()


@st.composite
def layouts(draw):
    """Floats of up to four dimensions: contiguous, permuted, channels-last, or a gapped slice."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=0, max_size=4))
    made = torch.randn(sizes, generator=torch.Generator().manual_seed(draw(st.integers(0, 99))))
    made = made.permute(draw(st.permutations(range(len(sizes)))))
    return made[..., ::2] if sizes and draw(st.booleans()) else made


@given(x=layouts(), dtype=st.sampled_from(list(FULL_RANGES)), zero=st.sampled_from([0, -6, 44]))
def test_quantize_once_when_called_then_gives_the_integers_of_the_canonical_operator(
    x, dtype, zero
):
    low, high, _ = FULL_RANGES[dtype]
    zero_point = max(zero, low)
    made = quantize_once(x, 0.0173, zero_point, dtype)
    expected = QuantizePerTensor(x, 0.0173, zero_point, low, high, dtype)
    assert made.dtype is dtype
    assert torch.equal(made, expected)
    # Plain tensors: written, viewed and copied as any other.
    assert torch.equal(made.clone().add_(1), expected + 1)
    back = dequantize_once(made, 0.0173, zero_point)
    assert torch.equal(back, DequantizePerTensor(made, 0.0173, zero_point, low, high, dtype))


def test_quantize_once_when_the_floats_go_then_the_integers_stay():
    x = torch.arange(64.0)
    made = quantize_once(x, 1.0, 0, torch.uint8)
    del x
    others = [torch.full((64,), 7, dtype=torch.uint8) for _ in range(64)]
    assert made.tolist() == list(range(64))
    assert all(int(other.sum()) == 7 * 64 for other in others)


def test_quantize_once_when_channels_last_then_its_result_is():
    x = torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last)
    made = quantize_once(x, 1.0, 0, torch.uint8)
    assert made.is_contiguous(memory_format=torch.channels_last)
    assert made.stride() == x.stride()

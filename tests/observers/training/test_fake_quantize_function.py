"""Whole-tensor steps against torch's own operators: results and gradients equal to the last bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pt2e_quant.observers.training.fake_quantize_function import (
    fake_quantize_tensor,
    is_on_fast_path,
)

RANGES = [(-128, 127), (-127, 127), (0, 255), (-8, 7), (0, 15), (-32768, 32767)]


@settings(max_examples=60)
@given(
    st.integers(0, 9999),
    st.sampled_from(RANGES),
    st.floats(1e-6, 10.0),
    st.booleans(),
    st.sampled_from([(), (7,), (3, 5), (2, 4, 3), (2, 3, 4, 5)]),
)
def test_result_when_on_the_fast_path_then_torchs(seed, limits, scale, per_channel, shape):
    low, high = limits
    generator = torch.Generator().manual_seed(seed)
    has_axis = per_channel and len(shape) > 0
    axis = int(torch.randint(len(shape), (), generator=generator)) if has_axis else None
    count = 1 if axis is None else shape[axis]
    scales = scale * (torch.rand(count, generator=generator) + 0.5)
    zero_points = torch.randint(low, high + 1, (count,), generator=generator, dtype=torch.int32)
    # Ties and ends of the range among them: where rounding and the gradient's bounds could part.
    steps = torch.randint(2 * low - 9, 2 * high + 9, shape, generator=generator) / 2
    x = (steps * scale).requires_grad_()
    y = x.detach().clone().requires_grad_()
    gradient = torch.randn(shape, generator=generator)
    assert is_on_fast_path(x)
    found = fake_quantize_tensor(x, scales, zero_points, low, high, axis)
    if axis is None:
        expected = torch.fake_quantize_per_tensor_affine(y, scales, zero_points, low, high)
    else:
        expected = torch.fake_quantize_per_channel_affine(y, scales, zero_points, axis, low, high)
    found.backward(gradient)
    expected.backward(gradient)
    assert torch.equal(found, expected)
    assert torch.equal(x.grad, y.grad)
    with torch.no_grad():
        assert torch.equal(fake_quantize_tensor(x, scales, zero_points, low, high, axis), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_result_when_another_dtype_then_torchs_operator_runs(dtype):
    x = torch.randn(5, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale, zero_point = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)
    assert not is_on_fast_path(x)
    found = fake_quantize_tensor(x, scale, zero_point, -8, 7, None)
    assert torch.equal(found, torch.fake_quantize_per_tensor_affine(x, scale, zero_point, -8, 7))
    assert found.dtype is dtype

"""Second moments of inputs: of linears as they are, of convolutions by their windows."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pt2e_quant.observers.statistics.input_hessian import InputHessian, Window


def test_hessian_when_batches_come_then_twice_the_mean_of_outer_products():
    x = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = InputHessian()
    assert not found.seen
    for batch in x.float():
        found(batch)
    rows = x.reshape(-1, 4)
    expected = 2 * rows.T @ rows / len(rows)
    torch.testing.assert_close(found.hessian[0], expected.float(), rtol=1e-5, atol=1e-6)
    factors = torch.tensor([0.5, 2.0, 1.0, 4.0])
    scaled = InputHessian()
    scaled(x.float() * factors)
    torch.testing.assert_close(found.scaled(factors).hessian, scaled.hessian)


@settings(max_examples=25)
@given(
    dims=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 2),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    groups=st.sampled_from([1, 2]),
)
def test_hessian_when_convolved_then_predicts_the_squared_output(
    dims, kernel, stride, padding, dilation, groups
):
    """w^T H w / 2 is the mean square of the output of a convolution with weights w."""
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        4, 6, kernel, stride, padding, dilation, groups, bias=False
    )
    x = torch.randn(2, 4, *[5] * dims)
    each = (kernel,) * dims, (stride,) * dims, ((padding, padding),) * dims, (dilation,) * dims
    found = InputHessian(Window(*each, groups))
    found(x)
    with torch.no_grad():
        expected = conv(x).transpose(0, 1).flatten(1).square().mean(1)
    rows = conv.weight.detach().flatten(1).reshape(groups, 6 // groups, -1)
    predicted = ((rows @ found.hessian) * rows).sum(2).flatten() / 2
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-6)


def test_statistics_when_settings_differ_then_not_alike():
    window = Window((3,), (1,), ((1, 1),), (1,), 1)
    assert InputHessian().is_like(InputHessian())
    assert InputHessian(window).is_like(InputHessian(window))
    assert not InputHessian(window).is_like(InputHessian())


@pytest.mark.parametrize("padding", [(0, 1), (2, 0)])
def test_hessian_when_padded_on_one_side_then_as_the_padded_input(padding):
    x = torch.randn(1, 2, 6, generator=torch.Generator().manual_seed(1))
    one, other = (InputHessian(Window((2,), (1,), (pad,), (1,), 1)) for pad in (padding, (0, 0)))
    one(x)
    other(nn.functional.pad(x, padding))
    assert torch.equal(one.hessian, other.hessian)

"""Fused sums with summands of any strides: what oneDNN reads must be laid out as it expects."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends import get
from pt2e_quant.flow.calibrate.sample import sqnr_db

pytestmark = pytest.mark.usefixtures("unmeasured")


class LinearSum(nn.Module):
    def __init__(self, layout) -> None:
        super().__init__()
        self.product, self.layout = nn.Linear(32, 24), layout

    def forward(self, x, y):
        return self.product(x) + self.layout(torch.sin(y))


class ConvSum(nn.Module):
    def __init__(self, layout) -> None:
        super().__init__()
        self.product, self.layout = nn.Conv2d(5, 24, 1), layout

    def forward(self, x, y):
        return torch.relu(self.product(x) + self.layout(torch.sin(y)))


def swapped(y):
    return y.transpose(1, 2)


def every_other(y):
    return y[..., ::2]


LINEAR_SUMMANDS = {
    "swapped": (swapped, (24, 7)),
    "strided": (every_other, (7, 48)),
    "expanded": (lambda y: y.expand(-1, 7, -1), (1, 24)),
}
CONV_SUMMANDS = {
    "swapped": (swapped, (7, 24, 9)),
    "strided": (every_other, (24, 7, 18)),
    "last_axis": (lambda y: y.permute(0, 3, 1, 2), (7, 9, 24)),
    "expanded": (lambda y: y.expand(-1, -1, 7, -1), (24, 1, 9)),
}


def compared(quantize_with, make_noise, model, x_shape, y_shape):
    """Lower with a dynamic batch; compare at several, the example's among them."""
    batch = torch.export.Dim("batch", min=1, max=8)
    example = make_noise(4, *x_shape), make_noise(4, *y_shape, seed=1)
    gm = quantize_with(model, example, dynamic_shapes=({0: batch}, {0: batch}))
    artifact = get("cpu").lower(gm)
    names = {str(n.target) for n in artifact.module.graph.nodes}
    assert any("pointwise.binary" in name for name in names)
    with torch.no_grad():
        for size in (4, 1, 8, 2):
            inputs = make_noise(size, *x_shape, seed=size), make_noise(size, *y_shape, seed=9)
            wanted = gm(*inputs)
            # A value that lies on a tie may be quantized to either side.
            assert all(sqnr_db([wanted], [artifact.run(*inputs)]) > 60 for _ in range(3))


@pytest.mark.parametrize("name", LINEAR_SUMMANDS)
def test_linear_sum_when_the_summand_is_strided_then_the_canonical_result(
    quantize_with, make_noise, name
):
    layout, shape = LINEAR_SUMMANDS[name]
    compared(quantize_with, make_noise, LinearSum(layout), (7, 32), shape)


@pytest.mark.parametrize("name", CONV_SUMMANDS)
def test_conv_sum_when_the_summand_is_strided_then_the_canonical_result(
    quantize_with, make_noise, name
):
    layout, shape = CONV_SUMMANDS[name]
    compared(quantize_with, make_noise, ConvSum(layout), (5, 7, 9), shape)


def test_program_when_the_summand_is_strided_then_the_canonical_result(quantize_with, make_noise):
    inputs = make_noise(4, 7, 32), make_noise(4, 24, 7, seed=1)
    gm = quantize_with(LinearSum(swapped), inputs)
    with torch.no_grad():
        found = get("cpu").lower(gm).program(*inputs)
        torch.testing.assert_close(found, gm(*inputs), rtol=1e-4, atol=1e-4)

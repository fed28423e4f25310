"""Sums that leave int32: oneDNN wraps them around silently, so such products stay float."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cpu.backend import BACKEND
from pt2e_quant.core.provenance import provenance_of

pytestmark = pytest.mark.usefixtures("unmeasured")

LONGEST = (2**31 - 1) // (255 * 128)


def of_ones(layer):
    """Equal weights meet equal activations: with 8 bits each sum is as large as it can be."""
    with torch.no_grad():
        layer.weight.fill_(1.0)
    return layer


PRODUCTS = {
    "linear": (of_ones(nn.Linear(70_000, 8)), (2, 70_000), "input features"),
    "conv1d": (of_ones(nn.Conv1d(23_400, 8, 3)), (1, 23_400, 4), "weights for an output channel"),
    "conv2d": (of_ones(nn.Conv2d(7_800, 8, 3)), (1, 7_800, 3, 3), "weights for an output channel"),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_when_its_sums_leave_int32_then_float_with_the_reason(quantize_with, name):
    layer, shape, counted = PRODUCTS[name]
    assert layer.weight[0].numel() * 255 * 127 > 2**31
    x = torch.ones(shape)
    torch.manual_seed(0)
    model = nn.Sequential(layer, nn.Flatten(1), nn.Linear(layer(x).flatten(1).shape[1], 64))
    gm = quantize_with(model, (x,), BACKEND.quantizer("int8"))
    (reason,) = [r.reason for r in provenance_of(gm).floats if r.op == f"aten.{name}"]
    assert f"at most {LONGEST} {counted}" in reason
    artifact = BACKEND.lower(gm)
    assert artifact.report.integer_ops["onednn.qlinear_pointwise"] == 1
    with torch.no_grad():
        wanted = gm(x)
        # Terms as large as the largest result are added in another order.
        error = (artifact.run(x) - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max()


def test_product_when_its_sums_just_fit_then_integers_and_right(quantize_with):
    layer = of_ones(nn.Linear(LONGEST, 2, bias=False))
    x = torch.ones(2, LONGEST)
    gm = quantize_with(nn.Sequential(layer), (x,), BACKEND.quantizer("int8"))
    artifact = BACKEND.lower(gm)
    assert artifact.report.integer_ops["onednn.qlinear_pointwise"] == 1
    torch.testing.assert_close(artifact.run(x), torch.full((2, 2), float(LONGEST)))

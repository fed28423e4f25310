"""Weights with zero points: integer products are made for weights without, others are refused."""

import pytest
import torch
from torch import nn

import pt2e_quant as pq
from pt2e_quant.core.errors import UnsupportedError
from pt2e_quant.core.qdq import DequantizePerChannel, read_qparams

pytestmark = pytest.mark.usefixtures("unmeasured")

PRODUCTS = {
    "linear": (lambda: nn.Linear(16, 24), (4, 16)),
    "conv2d": (lambda: nn.Conv2d(8, 24, 3), (2, 8, 6, 6)),
}


def shifted(backend, product):
    """A canonical graph whose weight has a zero point of 7 in each channel."""
    make, shape = PRODUCTS[product]
    torch.manual_seed(0)
    x = torch.randn(shape)
    ep = torch.export.export(nn.Sequential(make()).eval(), (x,))
    prepared = pq.calibrate(pq.prepare_pt2e(ep, backend.quantizer("int8")), [(x,)], progress=False)
    gm = pq.convert_pt2e(prepared)
    (dequantize,) = [n for n in gm.graph.nodes if n.target is DequantizePerChannel]
    zero_point = gm.get_buffer(dequantize.args[2].target)
    assert not zero_point.any()
    zero_point.fill_(7)
    assert (read_qparams(gm, dequantize).zero_point == 7).all()
    return gm, x


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_product_when_a_weight_has_a_zero_point_then_is_refused_or_computed_right(name, product):
    backend = pq.backends.get(name)
    if name == "cuda":
        backend = backend.allowing_unmeasured()
    gm, x = shifted(backend, product)
    with pytest.raises(UnsupportedError, match=product):
        backend.lower(gm)
    artifact = backend.lower(gm, strict=False)
    with torch.no_grad():
        torch.testing.assert_close(artifact.run(x), gm(x), rtol=1e-5, atol=1e-5)

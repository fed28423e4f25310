"""What stays float between quantized tensors keeps its weights: ONNX Runtime would round them."""

import pytest
import torch
from torch import nn

pytest.importorskip("onnxruntime", reason="the extra onnx is not installed")

import pt2e_quant as pq
from pt2e_quant.backends.registry import get


class Between(nn.Module):
    """A product in float between two in integers."""

    def __init__(self, product, act, kind) -> None:
        super().__init__()
        self.first, self.product, self.act, self.last = kind(), product, act, kind()

    def forward(self, x):
        return self.last(self.act(self.product(self.first(x))))


def conv():
    return nn.Conv2d(8, 8, 3, padding=1)


def linear():
    return nn.Linear(8, 8)


@pytest.mark.parametrize("act", [nn.Identity(), nn.ReLU(), nn.ReLU6()])
@pytest.mark.parametrize(
    ("product", "kind", "shape"),
    [
        (nn.ConvTranspose2d(8, 8, 4, 2, 1, bias=False), conv, (2, 8, 6, 6)),
        (nn.ConvTranspose2d(8, 8, 4, 2, 1), conv, (2, 8, 6, 6)),
        (conv(), conv, (2, 8, 6, 6)),
        (linear(), linear, (4, 8)),
    ],
)
def test_lower_when_a_product_between_quantized_ones_is_float_then_as_its_graph(
    product, kind, shape, act
):
    torch.manual_seed(0)
    product.reset_parameters()  # it was made when the tests were collected
    model = Between(product, act, kind).eval()
    with torch.no_grad():
        product.weight[0] *= 30.0  # one scale for all channels would show
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    target = get("onnx")
    quantizer = target.quantizer("int8").allowing("slower")
    if not isinstance(product, nn.ConvTranspose2d):
        quantizer.set_module_name("product", None)
    prepared = pq.prepare_pt2e(torch.export.export(model, (x,)), quantizer)
    pq.calibrate(prepared, [(x,)], progress=False)
    gm = pq.convert_pt2e(prepared)
    artifact = target.lower(gm)
    assert artifact.report.integer_ops
    assert pq.sqnr_db(gm(x), artifact.run(x)) > 45.0

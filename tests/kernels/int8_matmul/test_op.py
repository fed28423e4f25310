"""Attention's products in a canonical graph become int8_matmul."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.flow.calibrate.calibrate import calibrate
from pt2e_quant.flow.calibrate.sample import sqnr_db
from pt2e_quant.flow.convert.convert_pt2e import convert_pt2e
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e
from pt2e_quant.kernels.int8_matmul.op import Int8Matmul

ALLOWING = BACKEND.allowing_unmeasured()


class Attention(nn.Module):
    """Attention with heads that share keys, its scale a product or a quotient."""

    def __init__(self, heads, shared, *, divides):
        super().__init__()
        self.heads, self.shared, self.divides = heads, shared, divides
        self.qkv = nn.ModuleList(nn.Linear(32, n * 8) for n in (heads, shared, shared))
        self.out = nn.Linear(heads * 8, 32)

    def repeated(self, x):
        if self.heads == self.shared:
            return x
        batch, _, rows, width = x.shape
        wide = x[:, :, None].expand(batch, self.shared, self.heads // self.shared, rows, width)
        return wide.reshape(batch, self.heads, rows, width)

    def forward(self, x):
        batch, rows, _ = x.shape
        q, k, v = (f(x).view(batch, rows, -1, 8).transpose(1, 2) for f in self.qkv)
        scores = torch.matmul(q, self.repeated(k).transpose(2, 3))
        scores = scores / 8**0.5 if self.divides else scores * 8**-0.5
        mixed = torch.matmul(torch.softmax(scores, -1), self.repeated(v))
        return self.out(mixed.transpose(1, 2).reshape(batch, rows, -1))


def lowered(model):
    torch.manual_seed(0)
    model = model.eval()
    batch, rows = torch.export.Dim("batch", max=64), torch.export.Dim("rows", max=512)
    sizes = ({0: batch, 1: rows},)
    ep = torch.export.export(model, (torch.randn(2, 9, 32),), dynamic_shapes=sizes)
    prepared = prepare_pt2e(ep, BACKEND.quantizer("int8"))
    calibrate(prepared, [(torch.randn(4, 9, 32),) for _ in range(3)], progress=False)
    gm = convert_pt2e(prepared)
    return gm, ALLOWING.lower(gm)


@pytest.mark.parametrize(
    "model", [Attention(4, 4, divides=True), Attention(4, 2, divides=False)], ids=["own", "shared"]
)
def test_attention_when_lowered_then_both_products_are_calls_and_numbers_hold(model):
    gm, artifact = lowered(model)
    scores, mixed = [n for n in artifact.module.graph.nodes if n.target is Int8Matmul]
    # The factor is part of the scale, and shared keys are read where they lie.
    assert {n.target for n in artifact.module.graph.nodes} & REST == set()
    assert scores.args[1].meta["val"].shape[1] == model.shared
    assert mixed.args[1].meta["val"].shape[1] == model.shared
    x = torch.randn(3, 13, 32)
    # Sums are exact here and rounded in the q/dq graph: a tie may fall to the other side.
    assert sqnr_db([gm(x)], [artifact.run(x)]) > 40


REST = {
    torch.ops.aten.matmul.default,
    torch.ops.aten.mul.Tensor,
    torch.ops.aten.div.Tensor,
    torch.ops.aten.expand.default,
}

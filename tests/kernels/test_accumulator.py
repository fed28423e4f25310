"""Sums that leave int32: matrix units wrap around or saturate, so such products stay float."""

import pytest
import torch
from torch import nn

from pt2e_quant.backends.cuda.backend import BACKEND
from pt2e_quant.core.provenance import provenance_of
from pt2e_quant.flow.prepare.prepare_pt2e import prepare_pt2e


class Scores(nn.Module):
    def __init__(self, depth):
        super().__init__()
        self.query, self.key = nn.Linear(2, depth), nn.Linear(2, depth)

    def forward(self, x):
        return self.query(x) @ self.key(x).transpose(1, 2)


PRODUCTS = {
    "linear": (nn.Linear, (65_793, 8), lambda k: (2, k)),
    "conv1d": (lambda c, o: nn.Conv1d(c, o, 3), (21_931, 8), lambda c: (1, c, 4)),
    "conv2d": (lambda c, o: nn.Conv2d(c, o, 3), (7_310, 8), lambda c: (1, c, 3, 3)),
}


def reason_of(model, x, operator):
    """Why an operator is float; empty if it is not."""
    prepared = prepare_pt2e(torch.export.export(model.eval(), (x,)), BACKEND.quantizer("int8"))
    return "".join(r.reason for r in provenance_of(prepared).floats if r.op == operator)


@pytest.mark.parametrize("name", PRODUCTS)
def test_product_when_it_has_too_many_terms_then_stays_float(name):
    make, (depth, outputs), shape = PRODUCTS[name]
    # Behind it, something that is quantized in either case.
    for terms, is_float in ((depth, False), (depth + 1, True)):
        product = make(terms, outputs)
        x = torch.ones(shape(terms))
        model = nn.Sequential(product, nn.Flatten(1), nn.LazyLinear(64))
        model(x)
        assert ("at most 65793" in reason_of(model, x, f"aten.{name}")) is is_float


def test_product_when_of_two_tensors_then_both_zero_points_count():
    x = torch.ones(1, 3, 2)
    assert "at most 33025" not in reason_of(Scores(33_025), x, "aten.matmul")
    assert "at most 33025" in reason_of(Scores(33_026), x, "aten.matmul")

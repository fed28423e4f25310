import torch
from torch import nn

from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.linear_forms import products_as_linears

X = torch.randn(2, 6, generator=torch.Generator().manual_seed(0))


class Products(nn.Module):
    """matmul and addmm by one matrix, as GPT-2's layers."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.arange(30.0).reshape(6, 5) / 30)
        self.b = nn.Parameter(torch.arange(5.0))

    def forward(self, x):
        return x @ self.w + torch.addmm(self.b, x, self.w)


def test_product_when_an_operand_is_constant_then_becomes_a_linear(program):
    p = program(Products(), (X,)).apply(products_as_linears, drop_dead_constants)
    targets = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert targets == ["aten.linear.default", "aten.linear.default", "aten.add.Tensor"]
    p.matches().leaves_model_alone().is_idempotent(products_as_linears)


def test_product_when_operands_are_computed_or_bias_scaled_then_stays(program):
    class Others(Products):
        def forward(self, x):
            return x @ x.mT @ x + torch.addmm(self.b, x, self.w, beta=2) @ self.w.mT

    p = program(Others(), (X,)).apply(products_as_linears)
    targets = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert targets.count("aten.addmm.default") == 1
    assert targets.count("aten.matmul.default") >= 2
    p.matches()

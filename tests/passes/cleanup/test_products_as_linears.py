import pytest
import torch
from torch import nn
from torch.export import Dim

from pt2e_quant.passes.cleanup import contractions
from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.linear_forms import (
    einsums_as_linears,
    products_as_linears,
    vectors_as_rows,
)

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


class Einsum(nn.Module):
    def __init__(self, equation, *shape, first=False):
        super().__init__()
        self.equation, self.first = equation, first
        self.w = nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(1)))

    def forward(self, x):
        operands = (self.w, x) if self.first else (x, self.w)
        return torch.einsum(self.equation, *operands)


STEPS = torch.randn(2, 3, 4, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "model",
    [
        Einsum("bthd,hde->bte", 4, 6, 5),
        Einsum("b t h d, k d e -> b k t h e", 2, 6, 3),
        Einsum("...d,od->...o", 5, 6),
        Einsum("od,b...d->bo...", 5, 6, first=True),
        Einsum("bthd,te->bhde", 3, 5),
        Einsum("bthd,hde->bthe", 4, 6, 5),
        Einsum("bthd,d->bth", 6),
        Einsum("bthd,hde->bthe", 1, 6, 5),
    ],
)
def test_einsum_when_axes_of_its_constant_are_summed_or_new_then_a_linear(
    program, monkeypatch, model
):
    monkeypatch.setattr(contractions, "LEAST_MATRIX", 0)
    p = program(model, (STEPS,), ({0: Dim("batch", max=8)},)).apply(einsums_as_linears)
    targets = [str(n.target) for n in p.gm.graph.nodes if n.op == "call_function"]
    assert "aten.linear.default" in targets
    assert "aten.einsum.default" not in targets
    p.matches().leaves_model_alone().is_idempotent(einsums_as_linears)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Einsum("bthd,thde->bthe", 3, 4, 6, 5), "more than one axis"),
        (Einsum("bthd,hde->bth", 4, 6, 5), "one operand alone is summed"),
        (Einsum("bthd,hde->bthe", 4, 6, 5), "matrices is small"),
        (Einsum("bthd,dd->bth", 6, 6), "repeats an axis"),
        (Einsum("bthd,de", 6, 5), "names no result"),
        (Einsum("bthd,de->bthe", 1, 5), "of size 1 is expanded"),
    ],
)
def test_einsum_when_it_is_no_linear_then_stays_with_the_reason(program, model, reason):
    gm = program(model, (STEPS,)).gm
    result = einsums_as_linears(gm)
    assert not result.changed
    assert reason in result.notes[0].text


class Vector(nn.Module):
    """A linear by a vector, as D-FINE weighs the bins of its boxes."""

    def __init__(self, bias):
        super().__init__()
        self.w = nn.Parameter(torch.arange(6.0))
        self.b = nn.Parameter(torch.tensor(0.5)) if bias else None

    def forward(self, x):
        return nn.functional.linear(x, self.w, self.b)


@pytest.mark.parametrize(
    ("shape", "bias"), [((6,), False), ((2, 6), False), ((2, 3, 6), False), ((2, 3, 6), True)]
)
def test_linear_when_its_weight_is_a_vector_then_has_one_row(program, shape, bias):
    p = program(Vector(bias), (torch.ones(shape),)).apply(vectors_as_rows)
    linear = p.gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)[0]
    assert linear.args[1].meta["val"].shape == (1, 6)
    p.matches().leaves_model_alone().is_idempotent(vectors_as_rows)


class Joined(nn.Module):
    """GPT-2's layer: batch and length are joined for addmm, and parted behind it."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.w = sizes, nn.Parameter(torch.arange(30.0).reshape(6, 5) / 30)
        self.b = nn.Parameter(torch.arange(5.0))

    def forward(self, x):
        y = torch.tanh(x)
        joined = y.view(self.sizes) if self.sizes else y.reshape(y.shape[0] * y.shape[1], 6)
        return torch.addmm(self.b, joined, self.w).view(*x.shape[:-1], 5)


@pytest.mark.parametrize("sizes", [(-1, 6), ()], ids=["-1", "product"])
def test_addmm_when_a_view_joins_its_rows_then_the_linear_stands_before_it(program, sizes):
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(0))
    p = program(Joined(sizes), (x,), ({0: Dim("batch", max=8)},)).apply(products_as_linears)
    (linear,) = (n for n in p.gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert linear.args[0].target is torch.ops.aten.tanh.default
    p.matches().leaves_model_alone().is_idempotent(products_as_linears)


def test_addmm_when_a_view_parts_its_columns_then_the_view_stays_before_it(program):
    class Parted(Joined):
        def forward(self, x):
            return torch.addmm(self.b, torch.tanh(x).view(-1, 6), self.w)

    x = torch.randn(2, 3, 12, generator=torch.Generator().manual_seed(0))
    p = program(Parted((-1, 6)), (x,)).apply(products_as_linears)
    (linear,) = (n for n in p.gm.graph.nodes if n.target is torch.ops.aten.linear.default)
    assert linear.args[0].target is torch.ops.aten.view.default
    p.matches()

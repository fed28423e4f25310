import pytest
import torch
from torch import nn

from pt2e_quant.graph.ops import aten
from pt2e_quant.graph.pipeline import run_passes
from pt2e_quant.passes.mutation.functionalize_activations import (
    functionalize_activations,
    in_place,
    restore_in_place,
)


class Run(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def kept(x):
    y = x.sin()
    z = y * 2
    y.relu_()
    return z + y


def of_view(x):
    y = x.sin()
    y[:, 0].relu_()
    return y


def promoted(x):
    y = torch.argsort(x)
    y.mul_(2)
    return y * x


SAFE = {
    "relu": (lambda x: x.sin().relu_(), aten.relu_.default),
    "add": (lambda x: x.sin().add_(x), aten.add_.Tensor),
    "hardtanh": (lambda x: nn.functional.hardtanh(x.sin(), inplace=True), aten.hardtanh_.default),
    "integers": (promoted, aten.mul_.Tensor),
}
UNSAFE = {
    "read before": kept,
    "through a view": of_view,
    "of the input": lambda x: x.relu_() + 1,
}


def edited(function, x):
    gm = torch.export.export(Run(function), (x,)).module(check_guards=False)
    run_passes(gm, (functionalize_activations, restore_in_place))
    return gm


@pytest.mark.parametrize("name", SAFE)
def test_operator_when_nothing_else_reads_what_it_writes_then_in_place(name):
    function, target = SAFE[name]
    x = torch.randn(2, 3)
    gm = edited(function, x)
    assert [node for node in gm.graph.nodes if node.target is target]
    assert torch.equal(gm(x.clone()), function(x.clone()))


@pytest.mark.parametrize("name", UNSAFE)
def test_operator_when_another_may_see_the_write_then_as_it_was_made(name):
    x = torch.randn(2, 3)
    exported = torch.export.export(Run(UNSAFE[name]), (x,)).module(check_guards=False)
    run_passes(exported, (functionalize_activations,))
    gm = edited(UNSAFE[name], x)
    assert [n.target for n in gm.graph.nodes] == [n.target for n in exported.graph.nodes]
    assert torch.equal(gm(x.clone()), UNSAFE[name](x.clone()))


@pytest.mark.parametrize("target", [aten.conv2d.default, aten.relu_.default, len])
def test_in_place_when_there_is_no_such_form_then_none(target):
    assert in_place(target) is None

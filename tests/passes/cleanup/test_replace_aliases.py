"""Aliases of operators are called by one name, so that tables and patterns know them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pt2e_quant as pq
from pt2e_quant.passes.cleanup.replace_aliases import _OVERLOADS, replace_aliases
from pt2e_quant.pt2e.quantize_pt2e import prepare_pt2e as prepare_as_torchao
from tests.call_function import Call

X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)) / 2
ALIKE = {
    "clip": (lambda x: x.clip(0, 6), lambda x: x.clamp(0, 6)),
    "clip_": (lambda x: (x + 1).clip_(0, 6), lambda x: (x + 1).clamp_(0, 6)),
    "multiply": (lambda x: torch.multiply(x, x), lambda x: x * x),
    "subtract": (lambda x: torch.subtract(x, x.abs(), alpha=2), lambda x: x - 2 * x.abs()),
    "divide": (lambda x: torch.divide(x, 2.5), lambda x: x / 2.5),
    "divide_mode": (
        lambda x: torch.divide(x, 0.3, rounding_mode="floor"),
        lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    ),
    "true_divide": (lambda x: torch.true_divide(x, 2.5), lambda x: x / 2.5),
    "concat": (lambda x: torch.concat([x, x], 1), lambda x: torch.cat([x, x], 1)),
    "hstack": (lambda x: torch.hstack([x, -x]), lambda x: torch.cat([x, -x], 1)),
    "vstack": (lambda x: torch.vstack([x, -x]), lambda x: torch.cat([x, -x], 0)),
    "dstack": (lambda x: torch.dstack([x, -x]), lambda x: torch.cat([x, -x], 2)),
    "expit": (lambda x: torch.special.expit(x), lambda x: x.sigmoid()),
    "absolute": (lambda x: x.absolute(), lambda x: x.abs()),
    "moveaxis": (lambda x: x.moveaxis(2, 3), lambda x: x.movedim(2, 3)),
}


def names(gm):
    return [str(n.target) for n in gm.graph.nodes if n.op == "call_function"]


def captured(function, x=X):
    return torch.export.export(Call(function), (x,)).module(check_guards=False)


def test_aliases_when_listed_then_they_take_the_arguments_of_what_they_are():
    for alias, plain in _OVERLOADS.items():
        of_alias, of_plain = alias._schema.arguments, plain._schema.arguments
        assert [a.name for a in of_alias] == [a.name for a in of_plain], alias
        assert [str(a.type) for a in of_alias] == [str(a.type) for a in of_plain], alias


@pytest.mark.parametrize("name", ALIKE)
def test_alias_when_replaced_then_the_operators_and_values_of_the_plain_name(name):
    of_alias, of_plain = ALIKE[name]
    gm = captured(of_alias)
    assert replace_aliases(gm).changed
    torch.testing.assert_close(gm(X), of_plain(X))
    assert not replace_aliases(gm).changed
    assert not {*names(gm)} & {str(target) for target in _OVERLOADS}


@pytest.mark.parametrize("function", [torch.hstack, torch.dstack, torch.column_stack])
def test_join_when_its_tensors_get_more_dimensions_then_it_stays(function):
    x = X[0, 0, 0]
    gm = captured(lambda y: function([y, -y]), x)
    assert not replace_aliases(gm).changed
    torch.testing.assert_close(gm(x), function([x, -x]))


class Between(nn.Module):
    def __init__(self, function):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.function = nn.Conv2d(3, 4, 1), function
        self.after = nn.Conv2d(function(X[:, :1].repeat(1, 4, 1, 1)).shape[1], 2, 1)

    def forward(self, x):
        return self.after(F.relu(self.function(self.before(x))))


@pytest.mark.parametrize("name", [n for n in ALIKE if n != "subtract"])
def test_alias_when_prepared_then_quantized_as_the_plain_name(name):
    found = []
    for function in ALIKE[name]:
        program = torch.export.export(Between(function).eval(), (X,))
        prepared = pq.prepare_pt2e(program, pq.backends.get("xnnpack").quantizer())
        found.append(sum(n.op == "call_module" for n in prepared.graph.nodes))
    assert found[0] == found[1]


def test_alias_when_prepared_as_torchao_does_then_it_keeps_its_name():
    class Nothing(pq.Quantizer):
        def annotate(self, model):
            return model

        def validate(self, model):
            pass

    gm = torch.export.export(Between(ALIKE["clip"][0]).eval(), (X,)).module()
    with pytest.warns(pq.Pt2eQuantWarning, match="no tensor"):
        prepared = prepare_as_torchao(gm, Nothing())
    assert "aten.clip.default" in names(prepared)

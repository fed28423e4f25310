"""Constants of control-flow bodies become operands again."""

import torch
from torch import Tensor, nn
from torch.export import export

from pt2e_quant.passes.cleanup.drop_dead_constants import drop_dead_constants
from pt2e_quant.passes.cleanup.lift_constants import lift_constants
from pt2e_quant.passes.cleanup.sink_constants import sink_constants


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        def inner(y: Tensor) -> Tensor:
            return torch.cond(y.max() > 1, lambda z: self.a(z), lambda z: self.b(z), (y,))

        return torch.cond(x.sum() > 0, inner, lambda y: self.c(y), (x,))


INPUTS = (torch.ones(2, 4), torch.full((2, 4), 2.0), -torch.ones(2, 4))


def _sunk():
    model = Nested().eval()
    gm = export(model, (INPUTS[0],)).module(check_guards=False)
    sink_constants(gm)
    drop_dead_constants(gm)
    return model, gm


def test_lift_when_bodies_are_nested_then_no_body_holds_constants():
    model, gm = _sunk()
    assert lift_constants(gm).changed
    for body in (m for m in gm.modules() if isinstance(m, torch.fx.GraphModule) and m is not gm):
        body.graph.lint()
        assert not list(body.parameters(recurse=False))
    for x in INPUTS:
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_lift_when_done_then_the_graph_can_be_exported_again():
    model, gm = _sunk()
    lift_constants(gm)
    again = export(gm, (INPUTS[0],)).module()
    for x in INPUTS:
        torch.testing.assert_close(again(x), model(x), rtol=0, atol=0)


def test_lift_when_no_body_holds_constants_then_declined():
    gm = export(Nested().eval(), (INPUTS[0],)).module(check_guards=False)
    assert not lift_constants(gm).changed


def test_lift_when_run_twice_then_the_second_changes_nothing():
    _, gm = _sunk()
    lift_constants(gm)
    assert not lift_constants(gm).changed

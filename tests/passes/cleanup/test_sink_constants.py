"""Constants of control flow move into its bodies."""

import torch
from torch import Tensor, nn
from torch.export import export

from pt2e_quant.passes.cleanup.sink_constants import sink_constants


class Cond(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: self.a(y), lambda y: self.b(y), (x,))


def _graph(model: nn.Module, *inputs: Tensor):
    return export(model.eval(), inputs).module(check_guards=False)


def _operands(gm):
    (call,) = [n for n in gm.graph.nodes if n.target is torch.ops.higher_order.cond]
    return [n.name for n in call.args[-1]]


def test_sink_when_operands_are_constants_then_only_run_time_ones_stay():
    gm = _graph(Cond(), torch.randn(2, 4))
    assert _operands(gm) == ["x", "a_bias", "a_weight", "b_bias", "b_weight"]
    result = sink_constants(gm)
    assert result.changed
    assert {note.text.split()[0] for note in result.notes} == {
        "a.bias",
        "a.weight",
        "b.bias",
        "b.weight",
    }
    assert _operands(gm) == ["x"]
    assert set(dict(gm.true_graph_0.named_parameters())) == {"a.weight", "a.bias"}


def test_sink_when_done_then_tensors_are_shared_not_copied():
    model = Cond()
    gm = _graph(model, torch.randn(2, 4))
    sink_constants(gm)
    assert gm.true_graph_0.a.weight.data_ptr() == model.a.weight.data_ptr()


def test_sink_when_done_then_outputs_are_equal():
    model = Cond()
    gm = _graph(model, torch.randn(2, 4))
    sink_constants(gm)
    for x in (torch.ones(2, 4), -torch.ones(2, 4)):
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def test_sink_when_there_is_no_control_flow_then_declined():
    gm = _graph(nn.Linear(2, 2), torch.randn(1, 2))
    assert not sink_constants(gm).changed


def test_sink_when_run_twice_then_the_second_changes_nothing():
    gm = _graph(Cond(), torch.randn(2, 4))
    sink_constants(gm)
    assert not sink_constants(gm).changed

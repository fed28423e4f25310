"""A graph that goes on from given integers behind its operators in float."""

import torch
from torch import Tensor, nn
from torch.export import export
from torch.fx import GraphModule

import pt2e_quant as pq
from pt2e_quant.backends.behind_floats import (
    as_given,
    given_behind,
    quantized_floats,
    run_given,
)
from pt2e_quant.backends.cut_graph import with_values
from pt2e_quant.flow.calibrate.sample import Sample


class Chain(nn.Module):
    """Linears with clamps behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(torch.relu(self.second(torch.relu(self.first(x)))))


def quantized() -> tuple[GraphModule, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    prepared = pq.prepare_pt2e(export(Chain().eval(), (x,)), pq.IntegerQuantizer())
    gm = pq.convert_pt2e(pq.calibrate(prepared, [x], progress=False))
    return with_values(gm, [])[0], x


def test_floats_when_a_clamp_follows_then_the_tensor_behind_it():
    gm, _ = quantized()
    nodes = {node.name: node for node in gm.graph.nodes}
    (name,) = quantized_floats(gm, {"linear_1"})
    assert nodes[name].args[0].args[0].name == "relu_1"
    assert quantized_floats(gm, {"linear_1", "relu_1"}) == (name,)
    assert quantized_floats(gm, {"no such"}) == ()


def test_given_when_they_are_the_graphs_own_then_nothing_changes():
    gm, x = quantized()
    names = quantized_floats(gm, {"linear", "linear_1"})
    wide, _ = with_values(gm, names)
    expected, *reals = wide(x)
    given = [as_given(gm, name, real) for name, real in zip(names, reals, strict=True)]
    sample = Sample.keep((x,), None)
    found, *own = run_given(given_behind(gm, names), sample, given)
    assert torch.equal(found, expected)
    assert all(torch.equal(a, b) for a, b in zip(own, reals, strict=True))


def test_given_when_one_is_another_then_all_behind_it_and_nothing_before():
    gm, x = quantized()
    names = quantized_floats(gm, {"linear", "linear_1"})
    wide, _ = with_values(gm, names)
    expected, first, second = wide(x)
    given = [as_given(gm, name, v) for name, v in zip(names, (first, second), strict=True)]
    given[0] = given[0] + (given[0] < 100).to(given[0].dtype)
    sample = Sample.keep((x,), None)
    found, own_first, own_second = run_given(given_behind(gm, names), sample, given)
    assert torch.equal(own_first, first)  # what the graph makes itself
    assert not torch.equal(own_second, second)
    assert torch.equal(found, expected)  # it reads the second, which is given
    assert quantized_floats(gm, {"linear"}) == names[:1]  # untouched

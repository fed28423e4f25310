"""Random numbers are told from what is computed: by the arguments where an operator may draw."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pt2e_quant.graph.random_draws import draws, reached

X = torch.zeros(2, 3, 4, 8)
DRAWING = {
    "randn_like": torch.randn_like,
    "rand": lambda x: x + torch.rand(8),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "dropout": lambda x: F.dropout(x, 0.3, training=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.3, training=True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "multinomial": lambda x: torch.multinomial(torch.sigmoid(x[0, 0]), 2),
    "normal": lambda x: torch.normal(x, torch.ones_like(x)),
    "branch": lambda x: torch.cond(x.sum() > 0, lambda v: v * 2, torch.rand_like, (x,)),
}
COMPUTING = {
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "dropout in evaluation": lambda x: F.dropout(x, 0.3, training=False),
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=True),
    "rrelu in evaluation": lambda x: F.rrelu(x, training=False),
    "branch": lambda x: torch.cond(x.sum() > 0, lambda v: v * 2, lambda v: v * 3, (x,)),
}


class Called(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, self.function(x).to(torch.float32) + 1


def graph_of(function) -> torch.fx.Graph:
    return torch.export.export(Called(function).eval(), (X,)).graph


@pytest.mark.parametrize("name", DRAWING)
def test_draws_when_random_numbers_are_drawn_then_one_node_does(name):
    assert sum(map(draws, graph_of(DRAWING[name]).nodes)) == 1


@pytest.mark.parametrize("name", COMPUTING)
def test_draws_when_nothing_is_drawn_then_no_node_does(name):
    assert not any(map(draws, graph_of(COMPUTING[name]).nodes))


@pytest.mark.filterwarnings("ignore:The tensor attributes .*_flat_weights:UserWarning")
def test_draws_when_a_recurrent_layer_has_dropout_then_only_in_training():
    for is_training in (False, True):
        layer = nn.LSTM(8, 8, num_layers=2, dropout=0.5).train(is_training)
        graph = torch.export.export(layer, (torch.zeros(3, 2, 8),)).graph
        assert any(map(draws, graph.nodes)) is is_training


def test_reached_when_a_node_draws_then_only_what_reads_it_is():
    graph = graph_of(torch.randn_like)
    first, second = graph.output_node().args[0]
    found = reached(graph, draws)
    assert second in found
    assert first not in found

"""Submodules named as a graph module's own attributes: its graph, its code, its metadata."""

import copy

import torch
from torch import Tensor, nn

import pt2e_quant as pq
from pt2e_quant.core.unlift import graph_module_of


class Named(nn.Module):
    """A model whose submodules and buffers have names that torch.fx uses."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code, self.code_ = nn.Linear(4, 4), nn.Embedding(6, 4), nn.Linear(4, 4)
        self.meta = nn.Linear(4, 4)
        self.register_buffer("recompile", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.recompile += 1
        h = self.graph(x) + self.code(x.argmax(-1))
        return self.meta(self.code_(h)) + self.recompile


def test_graph_module_of_when_names_are_its_own_then_as_the_model():
    torch.manual_seed(0)
    x, model = torch.randn(3, 4), Named().eval()
    program, untouched = torch.export.export(model, (x,)), copy.deepcopy(model)
    gm = graph_module_of(program)
    for _ in range(2):
        torch.testing.assert_close(gm(x), untouched(x))
    assert set(program.state_dict) == set(model.state_dict())
    assert gm.get_parameter("code__.weight") is model.code.weight


def test_quantize_when_a_submodule_is_named_graph_then_it_runs():
    torch.manual_seed(0)
    x, model = torch.randn(3, 4), Named().eval()
    backend = pq.backends.get("cpu").allowing_slower()
    artifact = pq.quantize(model, (x,), calibration_data=[(x,)], backend=backend, progress=False)
    assert pq.sqnr_db(model(x), artifact.run(x)) > 20
    assert pq.sqnr_db(model(x), artifact.run(x)) > 20

import torch
import torch.nn.functional as F
from torch import nn

from pt2e_quant.graph.alias import mutated_buffers, mutated_roots, roots, state_writers


class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(4, 3))
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("fixed", torch.ones(3))


def export(model, *args):
    return torch.export.export(model.eval(), args).module()


def test_roots_when_a_node_is_a_view_then_its_root_is_the_sources():
    class Views(nn.Module):
        def forward(self, x):
            y = x + 1
            a, b = y.split(1)
            return y.view(-1)[1:], a.t(), y * 2, b.reshape(3)

    gm = export(Views(), torch.ones(2, 3))
    root = {node.name: r.name for node, r in roots(gm.graph).items()}
    assert root["slice_1"] == root["view"] == root["getitem"] == root["t"] == "add"
    assert root["mul"] == "mul"
    assert root["x"] == "x"


def test_roots_when_a_call_has_many_results_then_they_are_apart():
    class Parts(nn.Module):
        def forward(self, x):
            values, _ = x.topk(2)
            return values.relu_()

    gm = export(Parts(), torch.ones(3))
    assert [n.name for n in mutated_roots(gm.graph)] == ["getitem"]


def test_mutated_buffers_when_written_in_any_way_then_all_are_found():
    class Writes(State):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(3))
            self.register_buffer("var", torch.ones(3))

        def forward(self, x):
            self.cache[1:3].copy_(x)
            self.count.add_(1)
            y = F.batch_norm(x, self.mean, self.var, training=True)
            return y + self.fixed, self.cache.sum()

    gm = torch.export.export(Writes(), (torch.ones(2, 3),)).module()
    assert mutated_buffers(gm) == ("cache", "count", "mean", "var")


def test_mutated_buffers_when_written_inside_a_region_then_found():
    class Region(State):
        def forward(self, x):
            with torch.no_grad():
                self.count.add_(1)
            return x + self.count

    gm = export(Region(), torch.ones(2, 3))
    assert "wrap_with_set_grad_enabled" in str(gm.graph)
    assert mutated_buffers(gm) == ("count",)


def test_mutated_buffers_when_in_evaluation_then_none():
    gm = export(nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()), torch.ones(2, 3))
    assert mutated_buffers(gm) == ()
    inplace = export(nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.ones(2, 3))
    assert mutated_buffers(inplace) == ()
    assert [n.name for n in mutated_roots(inplace.graph)] == ["linear"]


def test_mutated_buffers_when_a_list_is_written_in_place_then_found():
    class Lists(State):
        def forward(self, x):
            torch._foreach_add_([self.count, self.cache], 1)
            return x + self.count

    gm = export(Lists(), torch.ones(2, 3))
    assert mutated_buffers(gm) == ("cache", "count")


def test_state_writers_when_a_view_of_a_buffer_or_an_input_is_written_then_found():
    class Writes(State):
        def forward(self, x):
            fresh = (x * 2).relu_()
            self.cache[:2].add_(1.0)
            x.mul_(2.0)
            return fresh + self.cache.sum()

    graph = export(Writes(), torch.ones(3)).graph
    assert {node.name for node in state_writers(graph)} == {"add_", "mul_"}

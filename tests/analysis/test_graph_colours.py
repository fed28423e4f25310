import math

import torch
from torch import nn

from pt2e_quant.analysis.graph_colours import GraphPicture, places


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        parts = torch.split(torch.relu(self.fc(x)), 2, dim=-1)
        return torch.cat([parts[0].sigmoid(), parts[1].tanh()], -1) + x


def graph():
    return torch.export.export(Residual().eval(), (torch.randn(2, 4),)).module()


def test_places_when_ways_part_and_join_then_columns_are_longest_ways():
    found = {place.node: place for place in places(graph())}
    assert found["x"].column == 0
    assert found["sigmoid"].column == found["tanh"].column == 4
    assert sorted([found["sigmoid"].row, found["tanh"].row]) == [-0.5, 0.5]
    assert found["sigmoid"].before == found["tanh"].before
    assert set(found["add"].before) == {"cat", "x"}
    assert found["linear"].module == "fc"
    assert not any("getitem" in name or "weight" in name for name in found)


def test_graph_picture_when_drawn_then_known_nodes_are_coloured():
    decibels = {"linear": 30.0, "relu": 80.0, "cat": math.inf}
    made = GraphPicture(gm=graph(), decibels=decibels, text="t").figure()
    edges, grey, coloured = made.data
    assert list(coloured.marker.color) == [30.0, 50.0]
    assert "30.0 dB" in coloured.text[0]
    assert len(grey.x) + len(coloured.x) == len(places(graph()))
    assert None in edges.x
